"""``import taichi`` gives Quadrants, so that the tests run on it as they are; on the path if the tests are to do so."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

import quadrants


class Alias(MetaPathFinder, Loader):
    """Gives the module of Quadrants in place of one of Taichi."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.startswith("taichi.") else None

    def create_module(self, spec):
        module = import_module("quadrants" + spec.name.removeprefix("taichi"))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = module.__spec__.loader_state  # its own: Python has put in that of the alias


sys.meta_path.insert(0, Alias())
for name in [n for n in dir(quadrants) if n.startswith("Quadrants")]:
    setattr(quadrants, name.replace("Quadrants", "Taichi"), getattr(quadrants, name))
del sys.modules["taichi"]  # taichi_ext asks which of the two is imported
import_module("taichi_ext")
sys.modules["taichi"] = quadrants
