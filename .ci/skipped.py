"""The tests that a run has skipped, by its JUnit report: one argument of pytest per line."""

import sys
from xml.etree import ElementTree

for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
    if case.find("skipped") is not None:
        module, name = case.get("classname"), case.get("name", "")
        # a module that is skipped as a whole has its name as that of the test
        print(f"{module.replace('.', '/')}.py::{name}" if module else f"{name.replace('.', '/')}.py")
