"""The operators of torch.ops.flashsdk, called by their schemas: in C++ and in Python."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import flashsdk.torch  # noqa: E402 (which defines them)
from flashsdk import _torch_eager  # noqa: E402
from torch_cases import OFFSETS, SINK, USED, qkv  # noqa: E402

needs_native = pytest.mark.skipif(
    _torch_eager.native is _torch_eager.InPython, reason="flashsdk._torch_native is not built"
)

OPERATORS = [
    f"{name}_{way}" for name in ("mha", "mha_varlen", "attention") for way in ("fwd", "bwd")
]


def operands(operator="mha_fwd", **changes):
    """Arguments of an operator, by their names."""
    q, k, v = qkv(seqlen_q=48)
    schema = getattr(torch.ops.flashsdk, operator).default._schema
    given = dict.fromkeys((argument.name for argument in schema.arguments), None)
    given |= {"q": q, "k": k, "v": v, "mask": [], "softcap": 0.0, "dropout_p": 0.0}
    if operator.startswith("attention"):
        given |= dict.fromkeys(("num_splits", "max_seqlen_q", "max_seqlen_k"), 0)
    if operator.endswith("bwd"):
        given |= {"dout": q, "out": q, "lse": torch.zeros(2, 4, 48)}
    return given | {"deterministic": False, "backend": ""} | changes


@needs_native
def test_operators_have_kernels_in_cpp():
    for name in OPERATORS:
        for key in ("CPU", "CUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"flashsdk::{name}", key)


def test_options_are_in_the_order_of_the_schema():
    from flashsdk._torch_more import More
    from flashsdk._torch_ops import Options

    for name in OPERATORS:
        schema = getattr(torch.ops.flashsdk, name).default._schema
        names = tuple(argument.name for argument in schema.arguments)
        last = (*More._fields, *Options._fields) if "attention" in name else Options._fields
        assert names[-len(last) :] == last


MIXED = torch.zeros(2, 4, 48, 48, dtype=torch.float64)
REFUSED = {
    "k: num_heads_kv 3; a divisor of num_heads, which is 4": {"k": torch.zeros(2, 48, 3, 32)},
    "q: dtype float64; float32, float16 or bfloat16": {"q": torch.zeros(2, 48, 4, 32).double()},
    "q: shape (48, 4, 32); (batch, seqlen_q, num_heads, head_dim)": {"q": torch.zeros(48, 4, 32)},
    "v: shape (); an array of at least one dimension": {"v": torch.zeros(())},
    "bias: dtype float64; float32, float16, bfloat16 or bool": {"bias": MIXED},
    "alibi_slopes: dtype int64; float32": {"alibi_slopes": torch.zeros(4, dtype=torch.int64)},
    "softmax_scale: 1e+300; a number that float32 can hold": {"softmax_scale": 1e300},
    "softcap: 1e-300; 0, or a number that float32 can hold": {"softcap": 1e-300},
    "dropout_p: 1; 0 <= dropout_p < 1": {"dropout_p": 1.0},
    "dropout_p: -1e-300; 0 <= dropout_p < 1": {"dropout_p": -1e-300},
    "dropout_p: -0.1; 0 <= dropout_p < 1": {"dropout_p": -0.1},
    "dropout_p: 1e+300; 0 <= dropout_p < 1": {"dropout_p": 1e300},
    "softcap: -0.1; a finite number >= 0": {"softcap": -0.1},
    "backend: sm90; cpu, as q is on cpu": {"backend": "sm90"},
    "mask: 1 integers; those of encode_mask": {"mask": [1]},
    "blocks: not given; the lists of the layout that mask is": {"mask": [1] * 23},
    "blocks: given; none, as mask is no layout": {"mask": [0, 0, 0], "blocks": OFFSETS},
}
TABLE = torch.zeros(2, 3, dtype=torch.int32)
FP8 = {name: torch.zeros(2, 48, 4, 32).to(torch.float8_e4m3fn) for name in "kv"}
FP8["q"] = torch.zeros(2, 48, 4, 32, dtype=torch.float16)
REFUSED_MORE = {
    "sink: dtype float64; float32": {"sink": SINK.double()},
    "sink: shape (3,); (num_heads 4)": {"sink": SINK[:3]},
    "seqused_q: dtype int64; int32": {"seqused_q": torch.tensor([1, 2])},
    "seqused_k: 71 of sequence 0; 0 to seqlen_k, which is 48": {"seqused_k": OFFSETS[1:3] + 41},
    "block_table: given; none without seqused_k, the lengths": {"block_table": TABLE},
    "num_splits: -1; an integer from 1 to 1073741824, or None": {"num_splits": -1},
    "num_splits: 1073741825; an integer from 1 to 1073741824, or None": {"num_splits": 2**30 + 1},
    "block_table: given; none, as pages have no backward": {
        "operator": "attention_bwd", "block_table": TABLE, "seqused_k": USED["seqused_k"]
    },
    "sink: shape (2,); (num_heads 4)": {"operator": "attention_bwd", "sink": SINK[:2]},
    "v_descale: given; none, as k is float32 and no float8_e4m3fn": {"v_descale": SINK[None]},
    "k_descale: dtype int32; float32": {**FP8, "k_descale": TABLE},
    "k_descale: shape (4,); (1 or batch 2, 1 or num_heads_kv 4)": {**FP8, "k_descale": SINK},
    "k: dtype float8_e5m2; float32, float16, bfloat16 or float8_e4m3fn": {
        "k": FP8["k"].view(torch.float8_e5m2)
    },
    "k: dtype float8_e4m3fn; the dtype of q, as float8_e4m3fn has no backward": {
        "operator": "attention_bwd", **FP8
    },
}  # fmt: skip


@pytest.mark.parametrize("native", ["0", pytest.param("", marks=needs_native)])
def test_operators_refuse_in_the_same_words(native, tmp_path):
    """In a process of its own: an operator keeps the kernels that it was given."""
    refused = REFUSED | {k: {"operator": "attention_fwd"} | x for k, x in REFUSED_MORE.items()}
    calls = [
        (changes.get("operator", "mha_fwd"), line, operands(**changes))
        for line, changes in refused.items()
    ]
    torch.save(calls, tmp_path / "x")
    code = """
import sys, torch, flashsdk as fs, flashsdk.torch
for operator, line, given in torch.load(sys.argv[1]):
    try:
        getattr(torch.ops.flashsdk, operator)(**given)
    except fs.Error as error:
        print(str(error) == line or (str(error), line))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x"],
        capture_output=True, text=True, env={**os.environ, "FLASHSDK_TORCH_NATIVE": native},
    )  # fmt: skip
    assert done.stdout.split() == ["True"] * len(refused), done.stdout + done.stderr


@needs_native
@pytest.mark.parametrize(
    "changes, line",
    [
        ({"mask": [0, 0, 0, 16], "blocks": OFFSETS}, "mask: 4 integers; those of encode_mask"),
        (
            {"mask": [0, 0, 0, 16, 16, 48, 48, *[1, 1, 4, 3] * 4], "blocks": OFFSETS[:3]},
            "blocks: 3 elements at a list; as many as mask tells",
        ),
        (
            {"mask": [0, 0, 0, 16, 16, 48, 48, *[1, 1, -4, 3] * 4], "blocks": OFFSETS},
            "blocks: 4 elements at a list; as many as mask tells",
        ),
        (
            {"mask": [0, 0, 0, 16, 16, 48, 48, *[1, 1, 4, 3] * 4], "blocks": OFFSETS[::2]},
            "blocks: another tensor; int32, flat and contiguous",
        ),
        ({"seed": torch.zeros(2)}, "seed: dtype float32; int64 or uint64"),
        (
            {"seed": torch.zeros(1)},
            "seed: one element of another kind; int64, on cpu, or seed and offset where q is",
        ),
    ],
)
def test_operators_read_no_mask_that_encode_mask_did_not_write(changes, line):
    with pytest.raises(fs.Error) as caught:
        torch.ops.flashsdk.mha_fwd(**operands(**changes))
    assert str(caught.value) == line


@pytest.mark.parametrize("native", ["0", pytest.param("", marks=needs_native)])
def test_operators_out_of_memory(native):
    """PyTorch's own error arrives: by libtorch's stable ABI alone it was one without a text."""
    code = """
import torch, flashsdk.torch
q = torch.zeros(64).expand(1, 2**30, 2**14, 64)  # out: 2^52 bytes
lse = torch.zeros(1).expand(1, 2**14, 2**30)
k, rest = torch.zeros(1, 4, 1, 64), (None, None, None, None, [], None, 0.0, 0.0, False, "")
operators = torch.ops.flashsdk
for operator, arrays in (
    (operators.mha_fwd, (q, k, k)), (operators.mha_bwd, (q, None, q, k, k, q, lse))
):
    try:
        operator(*arrays, *rest)
    except RuntimeError as error:
        print(type(error).__name__, "can't allocate memory" in str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, env={**os.environ, "FLASHSDK_TORCH_NATIVE": native},
    )  # fmt: skip
    assert done.stdout.split() == ["RuntimeError", "True"] * 2, done.stdout + done.stderr
