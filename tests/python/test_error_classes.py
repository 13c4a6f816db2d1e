"""Of which class an Error is, and its fields: some of each kind, from every part of the package."""

import re
from pathlib import Path

import flashsdk as fs
import numpy as np
import pytest
from flashsdk import io
from flashsdk._commands import bench, files, verify
from flashsdk.masks import Csr

WRONG, UNSUPPORTED = fs.InvalidArgument, fs.Unsupported

Q = np.zeros((1, 32, 2, 16), np.float32)
BLOCKS = fs.BlockMask.from_dense(np.ones((2, 2), bool), 16)


def forward(**changes):
    tensors = [changes.pop(name, Q) for name in "qkv"]
    return fs.mha_fwd(*tensors, **changes)


def mixed_block():
    matrix = np.zeros((32, 32), bool)
    matrix[3, 20] = True
    return fs.layouts.from_matrix(matrix, 16)


def two_bands():
    blocks, bands = np.ones((2, 2), bool), (fs.Causal(), fs.SlidingWindow(3))
    fs.layouts.stack_heads([fs.BlockMask.from_dense(blocks, 16, band=band) for band in bands])


def problem(**changes):
    shapes = {"batch": 1, "seqlen_q": 32, "seqlen_k": 32, "num_heads": 3, "head_dim": 16}
    return io.Problem(**shapes | changes)


# What is called: the class, argument, given and allowed, which may go on.
CALLS = {
    # the library
    "another head_dim": (
        lambda: forward(k=Q[..., :8]), WRONG, "k", "shape (1, 32, 2, 8)", ""),
    "a long head": (
        lambda: forward(**{n: np.zeros((1, 2, 1, 600), np.float32) for n in "qkv"}),
        UNSUPPORTED, "q", "head_dim 600", "1 to 576"),
    "another layout": (
        lambda: forward(mask=fs.layouts.dense(32, 48, 16)),
        WRONG, "mask.seqlen_k", "48", "seqlen_k, which is 32"),
    "no such backend": (
        lambda: forward(backend="tpu"), WRONG, "backend", "tpu", ""),
    "no dropout": (lambda: forward(dropout_p=1.5), WRONG, "dropout_p", "1.5", "0 <= dropout_p < 1"),
    # masks and layouts
    "no limit": (lambda: fs.Band(1.5), WRONG, "left", "1.5", "None or an integer"),
    "no mask": (lambda: forward(mask="causal"), WRONG, "mask", "'causal'", "Dense(), Causal(),"),
    "an odd block": (
        lambda: fs.layouts.dense(32, 32, 24), WRONG, "block_size", "24", "one or two positive"),
    "ragged rows": (
        lambda: fs.BlockMask.from_dense([[True], [True, False]], 16),
        WRONG, "blocks", "[[True], [True, False]]", "an array, or lists of equal lengths"),
    "no lists": (
        lambda: fs.BlockMask((16, 16), 32, 32, None, None, *[Csr([[[0]]], [])] * 3),
        WRONG, "row_partial", "None", "a tuple of offsets and indices"),
    "no BlockMask of FlexAttention": (
        lambda: fs.BlockMask.from_flex(3), WRONG, "block_mask", "3", "a BlockMask of Flex"),
    "a block that blocks cannot say": (
        mixed_block, UNSUPPORTED,
        "matrix", "block (0, 1) of batch 0, head 0 is mixed", "one value throughout, or BlockM"),
    "two bands": (two_bands, UNSUPPORTED, "masks", "2 bands, ", "one band for all heads"),
    "no stride": (
        lambda: fs.layouts.butterfly(64, 64, 16, max_stride_blocks=3),
        WRONG, "max_stride_blocks", "3", "a power of two or None"),
    "no picture": (
        lambda: BLOCKS.plot(path="x.exe"), WRONG, "path", "'x.exe'", "a path that ends in .png"),
    # arrays, and the bytes they move
    "an output that is none": (
        lambda: fs.explain(Q, Q, Q, op="both"), WRONG, "op", "'both'", '"fwd" or "bwd"'),
    "a tile of one number": (
        lambda: io.tiled_forward(problem(), (3,)),
        WRONG, "tile", "(3,)", "(queries, keys), two integers"),
    "heads in groups that do not fit": (
        lambda: problem(num_heads_kv=2), WRONG, "num_heads_kv", "2", "a divisor of num_heads = 3"),
    "standard attention of groups": (
        lambda: io.standard_forward(problem(num_heads_kv=1)),
        UNSUPPORTED, "num_heads_kv", "1", "num_heads = 3"),
    # commands
    "no such case": (
        lambda: bench.run(backend="cpu", quick=True, words=["zebra"], out="x"),
        WRONG, "--filter", "'zebra'", ""),
    "a folder as a file": (
        lambda: files.writable_file("--out", Path("/")), WRONG, "--out", "'/', a folder", "a file"),
    "no GPU": (
        lambda: verify.run(seconds=None, count=1, seed=None, backend="sm80", framework="torch"),
        UNSUPPORTED, "--backend", "sm80", "cpu, as "),
}  # fmt: skip


def fields_of(call, kind):
    with pytest.raises(fs.Error) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value.argument, caught.value.given, caught.value.allowed


def check(call, kind, argument, given, allowed):
    name, *rest = fields_of(call, kind)
    assert name == argument
    for got, start in zip(rest, (given, allowed), strict=True):
        assert got.startswith(start) and got, (got, start)


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
def test_classes_and_fields(case):
    check(*case)


def test_of_pytorch():
    torch = pytest.importorskip("torch")
    from flashsdk import torch as adapter

    q = torch.zeros(1, 4, 2, 16)
    sparse, double = q.to_sparse(), q.double()
    bias = torch.zeros(1, 1, 4, 4, requires_grad=True)
    for call, *fields in (
        (lambda: adapter.attention(sparse, q, q), UNSUPPORTED, "q", "a tensor of layout", "a dens"),
        (lambda: adapter.attention(q, double, q), WRONG, "k", "", ""),
        (
            lambda: adapter.attention(q, q, q, bias=bias),
            UNSUPPORTED,
            "bias",
            "a tensor that",
            "one",
        ),
        (
            lambda: adapter.attention(q, q, q, seed=q[:1, :1, :1, :1]),
            WRONG,
            "seed",
            "shape",
            "an i",
        ),
        (lambda: adapter.flash_attn_func(q, q, q, window_size=3), WRONG, "window_size", "3", ""),
        (lambda: fs.mha_fwd(q, q, q, out=bias), WRONG, "out", "a tensor that requires a", "one"),
    ):
        check(call, *fields)


def test_of_jax():
    jax = pytest.importorskip("jax")
    from flashsdk.jax import attention

    q, key = jax.numpy.zeros((1, 4, 2, 16)), jax.random.key(0)
    bias = jax.numpy.zeros((1, 1, 4, 4))
    gradient = jax.grad(lambda bias: attention(q, q, q, bias=bias).sum())
    for call, *fields in (
        (lambda: attention(key, q, q), WRONG, "q", "dtype key", "an array of numbers"),
        (lambda: attention([1.0], q, q), WRONG, "q", "a list", "an array of JAX or NumPy"),
        (lambda: attention(q, q, q, dropout_p=0.1), WRONG, "dropout_key", "None", ""),
        (lambda: attention(q, q, q, backend="tpu"), WRONG, "backend", "'tpu'", '"cpu"'),
        (lambda: gradient(bias), UNSUPPORTED, "bias", "differentiated", "jax.lax.stop_gradient"),
    ):
        check(call, *fields)


def test_of_integrations():
    torch = pytest.importorskip("torch")
    from flashsdk.integrations._flash_attn_package.layers import rotary

    x, angles = torch.zeros(1, 4, 2, 8), torch.zeros(4, 4)
    for call, *fields in (
        (lambda: rotary.apply_rotary_emb(x[0], angles, angles), WRONG, "x", "shape (4, 2, 8)", ""),
        (lambda: rotary.apply_rotary_emb(x, angles, x), WRONG, "cos", "shape (4, 4), sin's", "two"),
    ):
        check(call, *fields)
    pytest.importorskip("transformers")
    from flashsdk.integrations import transformers

    check(lambda: transformers.register("flash"), WRONG, "name", '"flash"', 'one without "flash"')


def test_every_error_of_python_names_its_class():
    """A bare Error is what C++ makes of a message and a code."""
    package = Path(fs.__file__).parent
    found = [
        f"{file.relative_to(package)}: {line.strip()}"
        for file in package.rglob("*.py")
        for line in re.findall(r".*\braise (?:fs\.)?Error\(.*", file.read_text("utf-8"))
    ]
    assert not found
