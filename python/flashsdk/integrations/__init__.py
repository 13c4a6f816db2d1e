"""Doors of other libraries: transformers, flash_attn, torch_sdpa.

Nothing is imported here: each module imports the library that it is a door of.
"""
