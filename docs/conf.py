"""The documentation site: ``sphinx-build -W docs OUT``, with the extra ``docs``."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import latex2mathml.converter
from docutils.nodes import SkipNode

import taichi_ext

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / ".ci"))
import modules  # the script of that name

project, author, copyright = "taichi_ext", "The taichi_ext contributors", "The taichi_ext contributors"
version = release = taichi_ext.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme, html_title = "furo", f"taichi_ext {version}"
html_favicon = "favicon.svg"
html_math_renderer = "mathml"  # of this file: browsers typeset it without scripts and without a network
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
nb_execution_mode, nb_execution_raise_on_error, nb_execution_timeout = "force", True, 300
nitpicky = False
napoleon_use_ivar = True  # attributes of classes are a list in the text of the class
napoleon_use_rtype = False  # what stands before a colon in Returns is the start of its sentence
autodoc_typehints, autodoc_member_order = "none", "bysource"
templates_path: list[str] = []


def _complete(app: object, page: str, text: list[str]) -> None:
    """Put tables of modules in; links to files of the repository that are no pages are shown as paths."""
    if "<!-- modules -->" in text[0]:
        text[0] = text[0].replace("<!-- modules -->", modules.tables(text[0]))
    up = "../" * (page.count("/") + 1)
    text[0] = re.sub(rf"\[([^\]]*)\]\({re.escape(up)}([^)#]+)[^)]*\)", r"\1 (`\2`)", text[0])


def _signature(app: object, what: str, name: str, obj: object, options: object, signature: str, returns: str):
    """Objects that users do not make have parameters that are not public; they are shown without any."""
    return ("", returns) if what == "class" and re.search(r"[(, ]_", signature or "") else None


def _math(writer, node) -> None:
    """Write a formula as MathML."""
    display = "inline" if node.tagname == "math" else "block"
    writer.body.append(latex2mathml.converter.convert(node.astext(), display=display))
    raise SkipNode


def setup(app) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (_math, None), (_math, None))
    app.connect("source-read", _complete)
    app.connect("autodoc-process-signature", _signature)
