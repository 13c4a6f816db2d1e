"""Attention for PyTorch, with gradients and torch.compile.

``attention`` and ``varlen_attention`` give all that the library does, and ``kv_append`` fills a
cache for them. ``flash_attn_*`` take the arguments of flash-attn 2.8
(github.com/Dao-AILab/flash-attention), and ``scaled_dot_product_attention`` those of
torch.nn.functional, so that either can be swapped by changing an import. ``distributed``, which is
imported by itself, is for a sequence over several processes. Semantics are those of
docs/semantics.md of the sources, unless a docstring says otherwise.

What all share:

- Gradients reach q, k, v and a sink, through the output and through the log-sum-exp. Saved for
  backward are the arguments, out and lse: memory is linear in the sequence length. There is no
  second derivative, no forward-mode one, and none with respect to bias or alibi_slopes: all are
  errors. Only where a tensor with a tangent enters a function that torch.compile's inductor
  compiled is the tangent lost, as in inductor's own kernels.
- float32, float16 and bfloat16. Under torch.autocast q, k and v become the autocast dtype.
- With dropout and no seed, each call draws one by the generator of the tensors' device, as
  PyTorch's own dropout does: torch.manual_seed repeats it, and each replay of a CUDA graph draws
  anew. Activation checkpointing and torch.compile's memory budget drop in the backward what the
  forward dropped.
- CPU calls run on PyTorch's own threads, torch.get_num_threads() of them, unless
  ``flashsdk.set_num_threads`` or FLASHSDK_NUM_THREADS says how many: up to PyTorch's number of
  these run on its threads, more on the library's own, as all do with PyTorch before 2.10.
- DTensors stay sharded over the batch and over heads, with what belongs to them; over the sequence
  they are gathered, and pages are over the batch. So are heads and sequences that have lists of
  their own in a ``BlockMask``. Dropout of theirs is an Error, and so are DTensors given to
  ``kv_append``.
- torch.utils.flop_counter counts them as it counts scaled_dot_product_attention: bands in full, of
  a ``BlockMask`` the share that is visited.
- Bad input raises ``flashsdk.Error``, a ValueError, before anything runs; what torch.compile meets
  while it traces with ``fullgraph=True`` is torch's error with our line in it. Of tensors without
  data only ranks and devices are checked: of torch.export's, the rest when the program runs.
- Masks and bands may be made inside a compiled function. ``flashsdk.layouts`` and ``BlockMask``
  compute with NumPy: there they break the graph, which ``fullgraph=True`` refuses.
"""

from __future__ import annotations

from .._flash_attn_func import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .._flash_attn_kvcache import flash_attn_with_kvcache
from .._torch_explain import explain
from .._torch_kv_append import kv_append
from ._attention import attention, varlen_attention
from ._sdpa import scaled_dot_product_attention

__all__ = [
    "attention",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "kv_append",
    "scaled_dot_product_attention",
    "varlen_attention",
]

for _function in (attention, varlen_attention, scaled_dot_product_attention):
    _function.__module__ = __name__  # where it is to be found, for pickle and torch.fx
del _function
