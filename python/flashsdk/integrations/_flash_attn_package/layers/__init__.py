"""Layers of flash-attn: ``rotary``."""
