"""Jagged flash attention."""
