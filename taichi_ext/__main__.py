"""The command line of the demonstration: ``python -m taichi_ext``."""

import sys

from taichi_ext.demo.demo import main

if __name__ == "__main__":
    sys.exit(main())
