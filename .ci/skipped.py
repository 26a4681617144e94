"""The tests that a run has skipped, by its JUnit report: one argument of pytest per line."""

import sys
from pathlib import Path
from xml.etree import ElementTree

for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
    if case.find("skipped") is not None:
        # the module and, where there is one, the class; a module that is skipped as a whole is the name of the test
        parts = [*case.get("classname", "").split("."), case.get("name", "")]
        parts = [part for part in parts if part]
        if not case.get("classname"):
            parts = parts[0].split(".")
        file = next(n for n in range(len(parts), 0, -1) if Path(*parts[:n]).with_suffix(".py").is_file())
        print("::".join([f"{'/'.join(parts[:file])}.py", *parts[file:]]))
