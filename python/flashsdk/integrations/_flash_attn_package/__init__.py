"""What ``import flash_attn`` finds after ``flashsdk.integrations.flash_attn.install()``.

The names, arguments and results of flash-attn 2.8 (github.com/Dao-AILab/flash-attention), by
flashsdk's kernels and plain PyTorch: its functions, ``flash_attn_interface``, ``bert_padding`` and
``layers.rotary``.
"""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

__version__ = "2.8.3"  # whose names and arguments these are
