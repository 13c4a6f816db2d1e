"""The way of torch_sdpa.enable() in Python: as that in C++, and seen by nobody."""

import random
import sys
import threading
import time
import warnings
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import torch.nn.functional as functional  # noqa: E402
from flashsdk import _torch_eager  # noqa: E402
from flashsdk.integrations import _sdpa_kernels, torch_sdpa  # noqa: E402
from sdpa_cases import gradients, qkv, starts  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

sdpa, aten = functional.scaled_dot_product_attention, torch.ops.aten
by_python = pytest.mark.parametrize("sdpa_way", ["python"], indirect=True)


@pytest.fixture(autouse=True)
def off_again():
    yield
    torch_sdpa.disable()


# ---- the same calls as in C++

OPERATORS = {
    "for_cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "flash": "_scaled_dot_product_flash_attention",
    "packed": "_flash_attention_forward",
}


class Theirs(Exception):
    """Raised in the place of aten's own kernels, which trust that PyTorch has chosen them."""


@pytest.fixture
def theirs():
    """Below ours and in the place of aten's, for a pair of operators of a CPU."""
    library = torch.library.Library("aten", "IMPL", "CPU")

    def refuse(*_, **__):
        raise Theirs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (OPERATORS["for_cpu"], f"{OPERATORS['for_cpu']}_backward"):
            library.impl(name, refuse)
    yield
    library._destroy()


def odd(draw, x, may_go=False):
    """A tensor of such values, in one of the ways that a caller may come with it."""
    if x.dim() == 0 or not x.is_floating_point():
        return x
    kinds = ["negative", "last", "expanded", "grad", "offset"] + ["gone"] * may_go
    kind = draw.choice(["plain"] * 2 * len(kinds) + kinds)
    if kind == "negative":
        return torch._neg_view(x)
    if kind == "last" and x.dim() > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if kind == "expanded":
        return x[:1].expand_as(x)
    if kind == "gone":
        x = x.clone()
        x.untyped_storage().resize_(0)
    if kind == "offset":
        return torch.cat([x, x])[len(x) :]
    return x.requires_grad_() if kind == "grad" else x


def shapes_of(draw, rank, rows_first):
    """Of query, key and value: mostly fitting."""
    heads_kv, group = draw.choice([1, 2]), draw.choice([1, 2])
    dim = draw.choice([16] * 8 + [0, 7, 600])
    shapes = []
    for heads in (heads_kv * group, heads_kv):
        rows = draw.choice([14] * 9 + [20, 9, 0] if rank == 3 else [5, 9, 5, 9, 1, 0])
        middle = [rows, heads] if rows_first else [heads, rows]
        shape = [1, draw.choice([2] * 8 + [1]), *middle, dim]
        shapes.append(shape[5 - rank :])
    if rank == 4 and draw.random() < 0.9:
        shapes[1][0] = shapes[0][0]
    return *shapes, [*shapes[1][:-1], draw.choice([dim] * 9 + [8])]


def tensors(draw, operators):
    """query, key, value."""
    rank = draw.choice([3, 3, 3, 4, 4, 2] if operators == "packed" else [4] * 12 + [2, 3, 5])
    dtype = draw.choice([torch.float32] * 4 + [torch.bfloat16, torch.float16, torch.float64])
    made = [torch.randn(s).to(dtype) for s in shapes_of(draw, rank, operators == "packed")]
    if draw.random() < 0.05:
        made[1] = made[1].to(torch.float16)
    return [odd(draw, x, may_go=True) for x in made]


def mask_of(draw, q, k):
    if q.dim() != 4 or draw.random() < 0.5:
        return None
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[-2])
    shape = [draw.choice([n, n, 1]) for n in full][draw.choice([0, 0, 1, 2, 3, 4]) :]
    mask = torch.randn(shape).to(draw.choice([q.dtype, torch.float32, torch.bool]))
    kind = draw.choice(["", "", "", "expanded", "over keys", "five"])
    if kind == "expanded" and len(shape) >= 2:
        mask = mask.expand(full)
    if kind == "over keys" and len(shape) >= 2:
        mask = mask[..., :1].expand(full)
    return mask[None, None, None] if kind == "five" else odd(draw, mask)


def random_call(draw, operators):
    """The operator's forward, its arguments and keywords."""
    q, k, v = tensors(draw, operators)
    dropout_p = draw.choice([0.0] * 12 + [0.1])
    scales = [None, None, None, 0.3, -2.0, 0.0, float("inf"), float("nan"), 1e39]
    keywords = {"scale": draw.choice(scales)} if draw.random() < 0.7 else {}
    is_causal, debug = draw.random() < 0.4, draw.random() < 0.05
    if operators == "for_cpu":
        mask = mask_of(draw, q, k)
        keywords |= {"attn_mask": mask} if mask is not None or draw.random() < 0.2 else {}
        return [q, k, v, dropout_p, is_causal and draw.random() < 0.9], keywords
    if operators == "flash":
        return [q, k, v, dropout_p, is_causal, debug], keywords
    lengths = [None, None]
    if q.dim() == 3 or draw.random() < 0.1:
        some = (5, 9), (14,), (0, 14), (3, 3)
        same = draw.choice(some)
        lengths = [starts(same if draw.random() < 0.9 else draw.choice(some)) for _ in range(2)]
        if draw.random() < 0.1:
            lengths[draw.choice([0, 1])] = draw.choice([None, starts((5, 9)).long()])
    if draw.random() < 0.5:
        keywords |= {"window_size_left": draw.choice([None, -1, 0, 3])}
        keywords |= {"window_size_right": draw.choice([None, -1, 0, 2])}
    if draw.random() < 0.1:
        keywords["seqused_k"] = torch.tensor([5, 5], dtype=torch.int32)
    longest = [draw.choice([14] * 8 + [20, 3]) for _ in range(2)]
    return [q, k, v, *lengths, *longest, dropout_p, is_causal, debug], keywords


def gradient_of(draw, operators, args, keywords, results):
    """The arguments of the backward of such a call; of what no kernel has taken with an out."""
    q, k, v, *rest = args
    out = results[0] if results else torch.empty_like(q)
    lse = results[1] if results else torch.zeros(out.shape[:-1])
    dout = torch.randn(out.shape).to(out.dtype)
    dout = odd(draw, dout[0] if len(dout) and draw.random() < 0.1 else dout)
    saved = dout, q, k, v, out, lse
    if operators == "for_cpu":
        return [*saved, *rest], keywords
    none = torch.empty(0)
    if operators == "flash":
        offsets = draw.choice([torch.Tensor(), none, starts((5, 9))])
        state = results[6:8] if results else (none, none)
        return [*saved, offsets, offsets, 5, 5, *rest[:2], *state], keywords
    cu_q, cu_k, max_q, max_k, dropout_p, is_causal, _ = rest
    keywords = {name: x for name, x in keywords.items() if name != "seqused_k"}
    offsets = [torch.Tensor() if x is None else x for x in (cu_q, cu_k)]
    return [*saved, *offsets, max_q, max_k, dropout_p, is_causal, none, none], keywords


def shown(x):
    """Where a tensor lies, of what type; whatever else by what it says of itself."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape, x.stride(), x.requires_grad
    return tuple(map(shown, x)) if isinstance(x, tuple) else repr(x)


def outcome(operator, args, keywords):
    """The results, and what can be compared of them or of what was raised."""
    try:
        results = operator(*args, **keywords)
    except Theirs:
        return (), "theirs"
    except Exception as e:
        return (), (type(e), str(e).splitlines()[0])
    return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in results), shown(results)


def outcomes(kernels, operators, calls):
    """Of all calls by these kernels, each with what the log was told of it."""
    told, found = [], []
    kernels.watch_sdpa(lambda *call: told.append(shown(call)))
    kernels.override_sdpa(operators, "CPU")
    try:
        for call in calls:
            told.clear()
            found.append((*outcome(*call), list(told)))
    finally:
        kernels.restore_sdpa()
        kernels.watch_sdpa(lambda *_: None)
    return found


@pytest.mark.skipif(
    _torch_eager.built is _torch_eager.InPython,
    reason="flashsdk._torch_native is not built for this PyTorch",
)
@pytest.mark.parametrize("operators", OPERATORS)
def test_random_calls_are_taken_as_in_c_plus_plus(operators, theirs):
    draw = random.Random(operators)
    calls = [random_call(draw, operators) for _ in range(400)]
    forward = getattr(aten, OPERATORS[operators])
    backward = getattr(aten, f"{OPERATORS[operators].removesuffix('_forward')}_backward")
    ways = _torch_eager.built, _sdpa_kernels
    given = [(forward, *call) for call in calls]
    found = [outcomes(way, operators, given) for way in ways]
    given = [
        (backward, *gradient_of(draw, operators, *call, results))
        for call, (results, *_) in zip(calls, found[0], strict=True)
    ]
    for way, both in zip(ways, found, strict=True):
        both += outcomes(way, operators, given)
    for n, (one, other) in enumerate(zip(*found, strict=True)):
        same = one[1:] == other[1:]  # pytest would print tensors, of which some have no memory
        assert same, (n, one[1:], other[1:], *map(shown, calls[n % len(calls)][0]))
        for x, y in zip(one[0], other[0], strict=True):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    for direction in (found[0][: len(calls)], found[0][len(calls) :]):
        taken = sum(1 for results, *_ in direction if results)
        refused = sum(1 for results, _, told in direction if told and not results)
        counted = taken, refused, len(calls) - taken - refused
        assert all(n > 10 for n in counted), counted


# ---- seen by nobody


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


class Told(torch.Tensor):
    """Without __torch_dispatch__: operators get it as it is."""

    functions: ClassVar = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.functions.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def seen(function, inputs):
    """What a mode and the tensors' type have seen, and out."""
    Told.functions.clear()
    with Seen() as mode:
        out = function(*inputs)
    return [*mode.functions, *Told.functions], out


@by_python
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("kind", [torch.Tensor, Told])
def test_modes_and_subclasses_see_the_operator_alone(sdpa_way, kind):
    """What TorchScript runs comes to operators with both still on."""
    plain = [x.detach() for x in qkv()]
    inputs = [x.as_subclass(kind) for x in plain]
    for function in (sdpa, torch.jit.trace(sdpa, plain)):
        want, theirs = seen(function, inputs)
        with torch_sdpa.enable():
            got, ours = seen(function, inputs)
            assert torch.equal(ours, sdpa(*plain)) and not torch.equal(ours, theirs)
        assert got == want and type(ours) is type(theirs)


@by_python
def test_the_compiler_does_not_look_in(sdpa_way):
    """Below a graph break in a loop Python runs as it is, but for what Dynamo finds to compile."""
    graphs = []

    def note(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph

    def attend(q, k, v):
        for _ in range(2):
            torch._dynamo.graph_break()
            q = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]
        return q

    inputs = qkv()
    with torch_sdpa.enable():
        got = gradients(torch.compile(attend, backend=note), inputs)
        want = gradients(attend, inputs)
    torch._dynamo.reset()
    assert not graphs
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@by_python
def test_ours_go_while_a_call_is_on_its_way(sdpa_way):
    """It comes to Python's lock while that is held, until others are in place."""
    inputs = [x.detach() for x in qkv()]
    want, begun, got = sdpa(*inputs), [], []

    def call():
        begun.append(True)
        got.append(sdpa(*inputs))  # which lets the lock go, for the only time

    torch_sdpa.enable()
    thread, interval = threading.Thread(target=call), sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread.start()
        while not begun:
            time.sleep(0)
        end = time.monotonic() + 0.01
        while time.monotonic() < end:
            pass
        torch_sdpa.disable()
        torch_sdpa.enable()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-5)


@by_python
def test_pytorch_does_not_warn_of_what_is_overridden(sdpa_way):
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as told, torch_sdpa.enable():
            pass
    finally:
        torch.set_warn_always(False)
    assert not told


def test_an_older_pytorch(monkeypatch):
    monkeypatch.setattr(torch_sdpa, "_REGISTRY", False)
    with pytest.raises(fs.Unsupported, match=r"^torch: .*; 2\.11 or newer"):
        torch_sdpa.enable()
    torch_sdpa.disable()
    assert not torch_sdpa.enabled()
    assert "not enabled" in str(torch_sdpa.explain(*qkv()))
