"""Kernels: the compiler-scheduled baseline and the warp-specialized ones for Hopper and Blackwell.

Where no Triton is installed (macOS, Windows) `import triton` finds the emulator's stand-in, so that the same
kernel modules import there and run in the emulator. Nothing of it is loaded before somebody imports `triton`.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys


class TritonStandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last finder of all: gives `triton` when no other has it.

    But not to PyTorch, which would compile with it.
    """

    def find_spec(self, name, path=None, target=None):
        if name != "triton" or self._asked_by_torch():
            return None
        return importlib.machinery.ModuleSpec(name, self, origin="jfa.emulator.standin", is_package=True)

    @staticmethod
    def _asked_by_torch():
        frame = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
            frame = frame.f_back
        return frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch"

    def create_module(self, spec):
        return importlib.import_module("jfa.emulator.standin").package()

    def exec_module(self, module):
        """The package is complete when it is created."""


if not any(type(finder).__name__ == TritonStandIn.__name__ for finder in sys.meta_path):
    sys.meta_path.append(TritonStandIn())
