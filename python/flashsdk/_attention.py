"""``flashsdk.attention``: one function for arrays of any framework. Imports none: a caller has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from . import _frameworks, ops
from ._block_lists import boolean_mask, check_rank, of_mask
from ._errors import PROBABILITY, Error, InvalidArgument, real, renamed, truth
from .masks import Mask
from .ops import AttentionKeywords, Backend

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = TypeVar("Array")


class _Keywords(AttentionKeywords, total=False):
    seed: Any
    sink: Any
    seqused_q: Any
    seqused_k: Any
    block_table: Any
    k_descale: Any
    v_descale: Any
    num_splits: int | None


@overload
def attention(
    q: Array, k: Any, v: Any, *, return_lse: Literal[False] = ..., **keywords: Unpack[_Keywords]
) -> Array: ...
@overload
def attention(
    q: Array, k: Any, v: Any, *, return_lse: Literal[True], **keywords: Unpack[_Keywords]
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array, k: Any, v: Any, *, return_lse: bool, **keywords: Unpack[_Keywords]
) -> Array | tuple[Array, Array]: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Mask | Any | None = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: Any = None,
    sink: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    block_table: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: Backend | None = None,
) -> Any:
    """Exact attention on arrays of NumPy, CuPy, PyTorch or JAX: out, or (out, lse).

    PyTorch's tensors go to ``flashsdk.torch.attention`` and JAX's arrays to
    ``flashsdk.jax.attention``, with gradients; all others to ``flashsdk.mha_fwd``, without.

    q, k, v
        (batch, seqlen_q, num_heads, head_dim), (batch, seqlen_k, num_heads_kv, head_dim) and
        (batch, seqlen_k, num_heads_kv, head_dim_v): float32, bfloat16 or float16 on a CPU, the
        last two on a GPU; k and v also float8_e4m3fn beside a q of 16 bits, without a gradient.
        num_heads is a multiple of num_heads_kv.
    mask
        Dense(), Causal(), SlidingWindow(), a Band or a BlockMask; None is Dense(). Or a bool array,
        True = attend, (seqlen_q, seqlen_k) or (batch | 1, num_heads | 1, seqlen_q | 1, seqlen_k |
        1): it is read element by element and skips no block, as a bool bias. Of a mask of padding
        (batch, seqlen_k) pass ``mask[:, None, None, :]``.
    bias
        Added to the scores, or bool: (batch | 1, num_heads | 1, seqlen_q | 1, seqlen_k | 1). None
        beside a bool mask. It gets no gradient.
    alibi_slopes
        float32 (num_heads,) or (batch, num_heads): adds -slope * |i + seqlen_k - seqlen_q - j|.
    softmax_scale
        Multiplies q·k; head_dim ** -0.5 if None.
    softcap
        Above 0, a score s becomes softcap * tanh(s / softcap), before bias.
    dropout_p
        Probability in [0, 1) to drop an element of P, rounded to the nearest 1/256, at most
        255/256.
    seed
        Of dropout, 0 to 2^64 - 1; of JAX's arrays a key of jax.random. None draws one by the
        generator of q's device for PyTorch's tensors and is an Error for others.
    sink, seqused_q, seqused_k, block_table, k_descale, v_descale, num_splits
        Of serving and sinks: ``help(flashsdk.ops)``.
    return_lse
        Also return the logarithm of the sum of exp(scores), float32 (batch, num_heads, seqlen_q).
    deterministic
        True: the same bits from run to run, or an Error. None does what
        torch.use_deterministic_algorithms says of PyTorch's tensors, and is False for others.
    backend
        "cpu", "sm80", "sm90" or None, the fastest that fits.

    Returns out (batch, seqlen_q, num_heads, head_dim_v), of q's framework. A query that sees no key
    has out 0 and lse -inf. Raises ``Error``, one line, before anything runs. Source:
    FlashAttention, arXiv 2205.14135, algorithm 1.
    """
    kind = _frameworks.name((q, k, v))
    keywords: dict[str, Any] = {
        "mask": mask,
        "bias": bias,
        "alibi_slopes": alibi_slopes,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "deterministic": deterministic,
        "backend": backend,
    }
    more: dict[str, Any] = {
        "sink": sink,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "block_table": block_table,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "num_splits": num_splits,
    }
    if kind == "torch":
        from . import torch as adapter

        return adapter.attention(q, k, v, seed=seed, return_lse=return_lse, **keywords, **more)
    if kind == "jax":
        from . import jax as jax_adapter

        try:
            return jax_adapter.attention(
                q, k, v, dropout_key=seed, return_lse=return_lse, **keywords, **more
            )
        except Error as e:
            raise renamed(e, {"dropout_key": "seed"}) from None
    wanted = truth("return_lse", return_lse)
    if seed is None and real("dropout_p", dropout_p, allowed=PROBABILITY) != 0:
        raise InvalidArgument(
            "seed: None; an integer from 0 to 2^64 - 1, as dropout_p is more than 0"
        )
    boolean = boolean_mask(mask, bias)
    if boolean is not None:
        keywords |= {"mask": None, "bias": boolean}
    check_rank(keywords["bias"])
    try:
        out, lse = ops.mha_fwd(q, k, v, seed=0 if seed is None else seed, **keywords, **more)
    except Error as e:
        if boolean is None:
            raise
        raise of_mask(e, mask) from None
    return (out, lse) if wanted else out
