"""Jagged flash attention: the public names. Importing it asks for no GPU and no Triton."""

import importlib

from jfa import backends, jagged, reference
from jfa.attention import jagged_flash_attention

__all__ = ["backends", "jagged", "jagged_flash_attention", "reference"]


def __getattr__(name):
    if name in ("schedule", "steps"):  # modules that import Triton, only when somebody asks
        return importlib.import_module(f"jfa.{name}")
    raise AttributeError(f"module 'jfa' has no attribute {name!r}")
