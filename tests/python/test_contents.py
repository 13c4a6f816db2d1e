"""FLASHSDK_CHECK=1: lengths and tables of PyTorch's tensors are checked on their device.

A CPU's tensors go the same way, and there the library says what the words are.
"""

import os
import subprocess
import sys
from pathlib import Path

import flashsdk as fs
import pytest
from flashsdk import _bindings, _contents

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

HEADS, HEADS_KV, DIM = 4, 2, 16


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def rows(*shape, heads=HEADS_KV):
    return torch.zeros(*shape, heads, DIM)


Q, K = rows(2, 3, heads=HEADS), rows(2, 8)
PAGES, TABLE = rows(6, 4), int32([5, 0], [1, 3])
COS = torch.zeros(9, DIM // 2)


def forward(**options):
    return fs.mha_fwd(Q, K, K, **options)


def paged(used, table):
    return fs.mha_fwd(Q, PAGES, PAGES, seqused_k=used, block_table=table)


def backward(**options):
    lse = torch.zeros(2, HEADS, 3)
    return fs.mha_bwd(Q, Q, K, K, Q, lse, **options)


def packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q=3, max_seqlen_k=8):
    q, k = rows(6, heads=HEADS), rows(16)
    return fs.mha_varlen_fwd(q, k, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def append(used, table=None, added=2, **options):
    cache, new = (K if table is None else PAGES), rows(2, added)
    return fs.kv_append(cache, cache.clone(), new, new, used, block_table=table, **options)


def append_rotated(used, queries=2, **options):
    q = rows(2, queries, heads=HEADS)
    return append(used, q=q, rotary_cos=COS, rotary_sin=COS, **options)


CU = int32(0, 3, 6), int32(0, 8, 16)
BROKEN = {
    "seqused_q: 4 of sequence 1; 0 to seqlen_q, which is 3": lambda: forward(seqused_q=int32(0, 4)),
    "seqused_k: 9 of sequence 0": lambda: forward(seqused_k=int32(9, 9)),
    "seqused_k: -1 of sequence 1": lambda: backward(seqused_k=int32(8, -1)),
    "seqused_k: 9 of sequence 1; 0 to seqlen_k, which is 8": lambda: paged(int32(8, 9), TABLE),
    "block_table: 6 at [1, 0]": lambda: paged(int32(8, 1), int32([5, 0], [6, 7])),
    "block_table: -1 at [0, 1]": lambda: paged(int32(5, 0), int32([5, -1], [9, 9])),
    "cu_seqlens_q: begins with 1; 0": lambda: packed(int32(1, 3, 6), CU[1]),
    "cu_seqlens_k: 8 before 7; ascending": lambda: packed(CU[0], int32(0, 8, 7)),
    "cu_seqlens_k: ends with 17; at most": lambda: packed(CU[0], int32(0, 8, 17), 3, 9),
    "max_seqlen_q: 2; at least the longest sequence, 3": lambda: packed(*CU, 2),
    "seqused_k: 7 of sequence 1; 0 to 6, as the": lambda: append(int32(6, 7)),
    "block_table: 9 at [1, 1]; a page": lambda: append(int32(0, 3), int32([5, 9], [1, 9])),
    "rotary_cos: 9 positions; at least 10, as": lambda: append_rotated(int32(6, 7), 3, added=0),
}  # fmt: skip
ALLOWED = {
    "lengths": lambda: forward(seqused_q=int32(0, 3), seqused_k=int32(8, 0)),
    "entries behind a length": lambda: paged(int32(8, 4), int32([5, 0], [3, -7])),
    "packed": lambda: packed(*CU),
    "append": lambda: append(int32(6, 0)),
    "entries that nothing is appended to": lambda: append(int32(4, 0), int32([9, 5], [1, 9])),
    "rotary": lambda: append_rotated(int32(6, 0), 9, q_advances=False),
    "no sequence": lambda: fs.mha_fwd(Q[:0], K[:0], K[:0], seqused_k=int32()),
    "left to the library": lambda: fs.mha_fwd(Q.numpy(), K.numpy(), K.numpy()),
}


class Ran(Exception):
    """The call came to the library."""


def library(*_):
    raise Ran


@pytest.fixture
def only_the_check(monkeypatch):
    """FLASHSDK_CHECK=1, and a library that runs nothing."""
    monkeypatch.setattr(_contents, "ON", True)
    for name in ("forward", "backward", "append"):
        monkeypatch.setattr(_bindings, name, library)


@pytest.mark.parametrize("text", BROKEN)
def test_the_words_are_the_librarys(text, only_the_check, monkeypatch):
    with pytest.raises(fs.InvalidArgument) as ours:
        BROKEN[text]()
    monkeypatch.undo()
    with pytest.raises(fs.InvalidArgument) as the_librarys:
        BROKEN[text]()
    assert str(ours.value) == str(the_librarys.value)
    assert str(ours.value).startswith(text)


@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_right_runs(case, only_the_check, monkeypatch):
    with pytest.raises(Ran):
        ALLOWED[case]()
    monkeypatch.undo()
    ALLOWED[case]()


@pytest.mark.parametrize(
    "call",
    [
        lambda: forward(seqused_k=int32(9)),
        lambda: forward(seqused_k=int32(9, 9).long()),
        lambda: paged(int32(8, 8), TABLE.long() + 9),
        lambda: paged(int32(8, 8), TABLE[0] + 9),
        lambda: append(int32(9, 9)[None]),
        lambda: append(int32(2, 2), TABLE.float() + 9),
        lambda: packed(CU[0].long(), CU[1][None]),
        lambda: packed(*CU, "2", 2**70),
        lambda: append(int32(6, 6), q=Q[0], rotary_cos=[0.0], rotary_sin=3),
    ],
)
def test_shapes_and_dtypes_are_the_librarys(call, only_the_check):
    with pytest.raises(Ran):
        call()


def test_the_host_waits_once(only_the_check):
    """tolist() of the answer: nothing before it asks a tensor for its numbers."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function.overloadpacket)
            return function(*args, **(kwargs or {}))

    called: list = []
    for call in (*BROKEN.values(), *ALLOWED.values()):
        with Watch(), pytest.raises((fs.Error, Ran)):
            call()
    assert torch.ops.aten.argmax in called
    assert not {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero}.intersection(called)


PROGRAM = """
import torch, flashsdk as fs
from flashsdk import _bindings
from flashsdk.torch import attention, flash_attn_varlen_func, flash_attn_with_kvcache
def library(*_):
    raise SystemExit("not checked")
_bindings.forward = _bindings.append = library
q = torch.zeros(2, 1, 2, 8)
long = torch.tensor([8, 9], dtype=torch.int32)
calls = (
    lambda: attention(q, q, q, seqused_k=long),
    lambda: torch.compile(attention, backend="eager")(q, q, q, seqused_k=long),
    lambda: flash_attn_with_kvcache(q, q, q, q, q, cache_seqlens=long),
    lambda: flash_attn_varlen_func(q[0], q[0], q[0], long, long, 1, 1),
)
for call in calls:
    try:
        call()
    except fs.Error as e:
        print(e)
"""


def test_the_variable():
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "FLASHSDK_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *["seqused_k: 8 of sequence 0; 0 to seqlen_k, which is 1"] * 2,
        "cache_seqlens: 8 of sequence 0; 0 to 0, as the cache has room for 1 keys",
        "cu_seqlens_q: begins with 8; 0",
    ]


def test_the_variable_is_documented():
    page = Path(__file__).parents[2] / "docs" / "options.md"
    if not page.exists():
        pytest.skip("not a checkout")
    assert "| `FLASHSDK_CHECK` |" in page.read_text("utf-8")
