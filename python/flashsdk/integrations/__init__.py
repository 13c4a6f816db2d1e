"""Doors of other libraries: transformers, flash_attn, torch_sdpa."""
