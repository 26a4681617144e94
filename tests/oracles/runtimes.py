"""The runtime of the tests: with TAICHI_EXT_RUNTIME=quadrants, ``import taichi`` gives Quadrants, here and in processes."""

import os
import sys
from pathlib import Path

RUNTIME = os.environ.get("TAICHI_EXT_RUNTIME", "taichi")
_ALIAS = str(Path(__file__).parent / "quadrants_alias")

if RUNTIME == "quadrants" and _ALIAS not in sys.path:
    sys.path.insert(0, _ALIAS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ALIAS, os.environ.get("PYTHONPATH", "")]))
