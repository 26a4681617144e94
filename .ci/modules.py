"""The modules of the package as tables for docs/architecture.md, from the first lines of their docstrings.

The documentation site has them in the place of ``<!-- modules -->``; ``python .ci/modules.py`` prints them.
"""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "taichi_ext"
IMPORTED = re.compile(r"^from taichi_ext((?:\.\w+)+) import", re.MULTILINE)


def first_lines() -> dict[str, str]:
    """The first line of each module's docstring by its path, a module before those that it imports."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    texts = {path: text for path, text in texts.items() if path.stem != "__init__"}
    graph: dict[Path, list[Path]] = {path: [] for path in texts}
    for path, text in texts.items():
        imported = (PACKAGE.joinpath(*name[1:].split(".")).with_suffix(".py") for name in IMPORTED.findall(text))
        graph[path] = [other for other in imported if other in texts]
    order = reversed(list(TopologicalSorter(graph).static_order()))
    docstrings = {path: ast.get_docstring(ast.parse(texts[path])) or "" for path in order}
    return {path.relative_to(PACKAGE).as_posix(): text.split("\n")[0] for path, text in docstrings.items()}


def tables(page: str) -> str:
    """A table for each folder, in the order of the page's table of districts."""
    lines = first_lines()
    folders = re.findall(r"^\| `(\w+)/` \|", page.partition("## Districts")[2], re.MULTILINE)
    text = []
    for folder in [*folders, ""]:
        paths = [path for path in lines if path.rpartition("/")[0].partition("/")[0] == folder]
        text.append(f"### {f'`{folder}/`' if folder else 'Without a folder'}\n\n| module | job |\n|---|---|\n")
        text += [f"| `{path.removeprefix(f'{folder}/')}` | {lines[path].rstrip('.')} |\n" for path in paths]
        text.append("\n")
    return "".join(text).replace("``", "`")


if __name__ == "__main__":
    print(tables((PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")))
