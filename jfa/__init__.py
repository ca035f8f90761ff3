"""Jagged flash attention: the public names. Importing it asks for no GPU and no Triton."""

from jfa import backends, jagged, reference
from jfa.attention import jagged_flash_attention

__all__ = ["backends", "jagged", "jagged_flash_attention", "reference"]
