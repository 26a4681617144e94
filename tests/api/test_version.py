"""The package's own version, and the releases of Taichi that it runs on."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import taichi_ext
from taichi_ext.host.choice import check_version

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

pytestmark = pytest.mark.cpu_only("what no device changes")


@pytest.mark.parametrize("version", [(1, 7, 0), (1, 7, 1), (1, 6, 0)], ids=str)
def test_releases_of_taichi_that_are_wrong_are_refused(version):
    text = ".".join(map(str, version))
    with pytest.raises(ImportError, match=rf"Taichi {text} is installed.*force_scalarize_matrix.*pip install"):
        check_version("taichi", version)


@pytest.mark.parametrize("version", [(1, 7, 2), (1, 7, 3), (1, 7, 4)], ids=str)
def test_releases_of_taichi_that_are_right_are_taken(version):
    check_version("taichi", version)


@pytest.mark.taichi_only("the message names Taichi; test_host.py has that of Quadrants")
def test_a_release_that_is_wrong_is_refused_at_import_before_its_internals_are_used():
    script = """
        import sys
        import taichi as ti

        ti.__version__ = (1, 7, 1)
        try:
            import taichi_ext
        except ImportError as error:
            print(error)
        print([name for name in sys.modules if name.startswith("taichi_ext.backend")])
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *_, message, loaded = run.stdout.splitlines()
    assert message.startswith("taichi_ext needs Taichi 1.7.2 or later, and Taichi 1.7.1 is installed")
    assert loaded == "[]"


def test_the_oldest_release_is_that_of_the_requirements():
    (required,) = re.findall(r'"taichi>=([\d.]+),<1\.8"', PYPROJECT)
    with pytest.raises(ImportError, match=f"Taichi {re.escape(required)} or later"):
        check_version("taichi", (1, 7, 1))


def test_the_version_is_that_of_the_project_and_of_its_citation():
    (version,) = re.findall(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)
    assert taichi_ext.__version__ == version
    assert f'\nversion: "{version}"\n' in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_completion_shows_what_is_public():
    assert dir(taichi_ext) == sorted(taichi_ext.__all__)
