"""The figures that pages quote from examples: ``0.31 %<!-- meshes -->`` must be in what examples/meshes.py prints.

Arguments: the folder of the pages, and that of the outputs, ``meshes.py.log`` and so on.
"""

import re
import sys
from pathlib import Path

QUOTED = re.compile(r"([\d.,e+-]+)((?: of \d+)?) ?%?<!-- (\w+) -->")
pages, outputs = map(Path, sys.argv[1:])
quotes = [(p.name, *m.groups()) for p in sorted(pages.rglob("*.md")) for m in QUOTED.finditer(p.read_text("utf-8"))]
wrong = []
for page, number, rest, example in quotes:
    printed = (outputs / f"{example}.py.log").read_text("utf-8")
    if not re.search(rf"(?<![\d.]){re.escape(number + rest)}(?![\d.]*\d)", printed):
        wrong.append(f"{page}: examples/{example}.py does not print {number}{rest}")
print(f"{len(quotes)} figures of examples are quoted, {len(wrong)} of them are not what is printed")
sys.exit("\n".join(wrong) or 0)
