"""Empty stand-ins for libraries that models import to see or hear; their sizes do not need them.

Python imports this file by itself where its folder is on PYTHONPATH, as in each process that vLLM
starts to look at a class.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

LIBRARIES = ("torchvision", "torchaudio")


class Class(type):
    """A class with whatever attribute is asked for."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Library(types.ModuleType):
    """A library with whatever name is imported from it."""

    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Class(name, (), {"__init__": lambda *_, **__: None})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `LIBRARIES`."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in LIBRARIES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Library(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(Finder())
