"""The figures that pages quote from examples: ``0.31 %<!-- meshes -->`` must be in what examples/meshes.py prints.

Numbers of five digits or more may be rounded.

Arguments: the folder of the pages, and that of the outputs, ``meshes.py.log`` and so on.
"""

import re
import sys
from pathlib import Path

QUOTED = re.compile(r"([\d.,e+-]+)((?: of \d+)?) ?%?<!-- (\w+) -->")
pages, outputs = map(Path, sys.argv[1:])
quotes = [(p.name, *m.groups()) for p in sorted(pages.rglob("*.md")) for m in QUOTED.finditer(p.read_text("utf-8"))]
wrong = []


def is_printed(number: str, rest: str, printed: str) -> bool:
    """Whether a text has the number with what follows it, or a longer number that rounds to it."""
    if re.search(rf"(?<![\d.]){re.escape(number + rest)}(?![\d.]*\d)", printed):
        return True
    decimals = len(number.partition(".")[2])
    longer = (float(n) for n in re.findall(r"-?\d+\.\d+", printed))
    return sum(map(str.isdigit, number)) >= 5 and number in (f"{n:.{decimals}f}" for n in longer)


for page, number, rest, example in quotes:
    printed = (outputs / f"{example}.py.log").read_text("utf-8")
    if not is_printed(number, rest, printed):
        wrong.append(f"{page}: examples/{example}.py does not print {number}{rest}")
print(f"{len(quotes)} figures of examples are quoted, {len(wrong)} of them are not what is printed")
sys.exit("\n".join(wrong) or 0)
