"""PyTorch's own scaled_dot_product_attention with our kernels below it, and when it is not ours."""

import contextlib
import importlib
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import torch.nn.functional as functional  # noqa: E402
from flashsdk.integrations import torch_sdpa  # noqa: E402
from flashsdk.torch import scaled_dot_product_attention as ours_alone  # noqa: E402
from sdpa_cases import BOTH_WAYS, ONCE, gradients, qkv, same_as_math  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch._subclasses.schema_check_mode import SchemaCheckMode  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402
from torch_cases import TORCH, with_gradients  # noqa: E402

pytestmark = BOTH_WAYS
FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
sdpa = functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    yield
    torch_sdpa.disable()


# ---- what is ours, after the cases of PyTorch's test_transformers.py


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("batch, heads", [(2, 3), (12, 1)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(11, 17), (11, 103), (267, 17), (103, 103), (1, 5)])
def test_dense_and_causal(dtype, is_causal, batch, heads, seqlen_q, seqlen_k):
    with torch_sdpa.enable():
        inputs = qkv(batch, heads, None, seqlen_q, seqlen_k, 8, dtype)
        same_as_math(inputs, is_causal=is_causal)


MASKS = {
    "matrix": (11, 17),
    "row": (1, 17),
    "column": (11, 1),
    "all": (2, 3, 11, 17),
    "heads": (1, 3, 11, 17),
    "batch": (2, 1, 1, 17),
    "queries": (2, 3, 11, 1),
    "one": (1, 1, 1, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("boolean", [False, True])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_mask(dtype, boolean, shape):
    with torch_sdpa.enable():
        mask = torch.randn(shape) > -1 if boolean else torch.randn(shape, dtype=dtype)
        if boolean and shape[-2:] == (11, 17):
            mask[..., 3, :] = False  # a query that sees nothing
        same_as_math(qkv(2, 3, None, 11, 17, 8, dtype), mask)


@pytest.mark.parametrize("boolean", [False, True])
def test_backward_behind_the_with_of_queries_that_see_no_key(boolean):
    inputs = [x.requires_grad_() for x in qkv(2, 3, None, 11, 17, 8, torch.float32)]
    mask = torch.ones(2, 1, 11, 17, dtype=torch.bool)
    mask[1] = False
    mask[0, :, 3] = False
    if not boolean:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    want = torch.autograd.grad(sdpa(*inputs, mask).sum(), inputs)
    with torch_sdpa.enable():
        out = sdpa(*inputs, mask)
    for ours, theirs in zip(torch.autograd.grad(out.sum(), inputs), want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_expanded_mask():
    with torch_sdpa.enable():
        mask = torch.randn(2, 1, 1, 17).expand(2, 3, 11, 17)
        same_as_math(qkv(2, 3, None, 11, 17, 8), mask)
        mask = torch.randn(2, 1, 11, 1).expand(2, 3, 11, 17)
        same_as_math(qkv(2, 3, None, 11, 17, 8), mask)


@pytest.mark.parametrize("heads, heads_kv", [(8, 2), (6, 1), (9, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(heads, heads_kv, is_causal):
    with torch_sdpa.enable():
        inputs = qkv(2, heads, heads_kv, 40, 40)
        same_as_math(inputs, is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("scale", [None, 0.0, 0.3, -1.0])
def test_scale(scale):
    with torch_sdpa.enable():
        same_as_math(qkv(), scale=scale)


def test_layouts():
    """Results lie in memory as PyTorch's do: out like query, gradients with the rows first."""

    def strides(inputs):
        out = sdpa(*inputs)
        return [out.stride(), *(x.stride() for x in torch.autograd.grad(out.sum(), inputs))]

    packed = torch.randn(2, 40, 3, 4, 16)
    rows_first = [x.transpose(1, 2).requires_grad_() for x in packed.unbind(2)]
    last = [x.transpose(1, 3).contiguous().transpose(1, 3).detach() for x in qkv()]
    for inputs in (qkv(), rows_first, [x.requires_grad_() for x in last]):
        want = strides(inputs)
        with torch_sdpa.enable():
            assert strides(inputs) == want
            if torch_sdpa.explain(*inputs).taken:
                same_as_math(inputs)


def test_the_other_operators_of_a_gpu():
    """What stands at CUDA's dispatch key, here at CPU's: both directions, and what is refused."""
    kernels, aten = torch_sdpa._kernels, torch.ops.aten
    q, k, v = (x.detach() for x in qkv(seqlen_k=50))
    lower_right = causal_lower_right(40, 50)  # what causal means to these
    want = gradients(ours_alone, with_gradients([q, k, v]), lower_right)
    dump = torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention")
    kernels.override_sdpa("flash", "CPU")
    try:
        flash = aten._scaled_dot_product_flash_attention
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset, mask = flash(q, k, v, 0.0, True)
        assert torch.equal(out, want[0]) and out.stride() == q.stride()
        assert lse.shape == (2, 4, 40) and lse.is_contiguous()
        assert (cu_q, cu_k, max_q, max_k, mask.numel()) == (None, None, 40, 50, 0)
        none = torch.Tensor()
        grads = aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, lse, none, none, 40, 50, 0.0, True, seed, offset
        )
        for one, other in zip(grads, want[1:], strict=True):
            assert torch.equal(one, other)
        with pytest.raises(NotImplementedError, match="neither flashsdk nor PyTorch"):
            flash(q, k, v, 0.1, True)  # PyTorch has none on a CPU
        with pytest.raises(NotImplementedError, match="neither flashsdk nor PyTorch"):
            flash(q.double(), k.double(), v.double())
    finally:
        kernels.restore_sdpa()
    assert torch._C._dispatch_dump("aten::_scaled_dot_product_flash_attention") == dump


@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_of_masks_of_a_gpu(masked):
    """Here at CPU's dispatch key; its random state lies where query does, as CUDA graphs ask."""
    kernels, efficient = torch_sdpa._kernels, torch.ops.aten._scaled_dot_product_efficient_attention
    q, k, v = inputs = [x.detach() for x in qkv(dim=16)]
    mask = torch.randn(40, 40) if masked else None
    if masked:
        mask[7] = -torch.inf  # sees nothing
    want = gradients(ours_alone, with_gradients(inputs), mask)
    kernels.override_sdpa("efficient", "CPU")
    try:
        out, lse, seed, offset = efficient(q, k, v, mask, True)
        assert torch.equal(out, want[0])
        assert lse.shape == (2, 4, 64) and lse[..., :40].isfinite().all()
        for x in (seed, offset):
            assert x.device == q.device and x.shape == () and x.dtype == torch.int64
        rest = out, q, k, v, mask, out, lse, seed, offset, 0.0, [True, True, True, False]
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(*rest)
        for one, other in zip(grads[:3], want[1:], strict=True):
            assert torch.equal(one, other)
    finally:
        kernels.restore_sdpa()


def test_results_on_a_cpu_share_no_memory():
    """As the operator's schema says; on a GPU dropout's state lies behind lse."""
    q, k, v = (torch.randn(50, 4, 16) for _ in "qkv")
    offsets = torch.tensor([0, 20, 50], dtype=torch.int32)
    with torch_sdpa.enable(), SchemaCheckMode():
        results = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, offsets, 30, 30, 0.0, False, False
        )
    memory = [x.untyped_storage()._cdata for x in results]
    assert len(set(memory)) == len(results) == 5


# ---- whom PyTorch asks first on a GPU


@pytest.fixture
def order(monkeypatch):
    """A card's order, cuDNN first, that PyTorch makes when it first chooses."""
    cudnn, flash, efficient, math = (
        int(getattr(SDPBackend, name).value)
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    )
    unchosen = [flash, efficient, math, cudnn]
    state = SimpleNamespace(order=unchosen, started=False, hooks=[], chooses=True)
    state.cudnn_first = [cudnn, flash, efficient, math]
    state.ours_first = [flash, efficient, cudnn, math]

    def chosen():
        if state.chooses and state.order == unchosen:
            state.order = state.cudnn_first
        return state.chooses

    def start():
        state.started = True
        for hook in state.hooks:
            hook()

    state.start = start
    for name, call in {
        "when_cuda_starts": lambda hook: hook() if state.started else state.hooks.append(hook),
        "sdp_order": lambda: list(state.order),
        "set_sdp_order": lambda said: setattr(state, "order", list(said)),
        "_pytorch_has_chosen": chosen,
    }.items():
        monkeypatch.setattr(torch_sdpa, name, call)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: state.started)
    return state


def test_what_is_ours_is_asked_first_until_the_end(order):
    first = torch_sdpa._OursFirst()
    first.wish()
    assert not order.started and order.order[0] != order.cudnn_first[0]  # CUDA starts later
    order.start()
    assert order.order == order.ours_first
    first.leave()
    assert order.order == order.cudnn_first
    for _ in range(2):
        first.wish()
        assert order.order == order.ours_first
        first.leave()
        assert order.order == order.cudnn_first
    assert len(order.hooks) == 1


def test_an_order_that_somebody_else_said_stays(order):
    order.started = True
    first = torch_sdpa._OursFirst()
    first.wish()
    order.order = order.cudnn_first[::-1]
    first.leave()
    assert order.order == order.cudnn_first[::-1]


def test_cuda_starts_after_the_end_or_where_nothing_can_be_chosen(order):
    first = torch_sdpa._OursFirst()
    first.wish()
    first.leave()
    before = list(order.order)
    order.start()
    assert order.order == before
    order.chooses = False
    first.wish()
    assert order.order == before


def test_what_fails_half_way_leaves_nothing(monkeypatch):
    def refuse(_):
        raise RuntimeError("refused")

    monkeypatch.setattr(torch_sdpa._sdpa_dtensor, "prepare", refuse)
    q, k, v = qkv(1, 2, None, 20, 20, 16)
    before = sdpa(q, k, v)
    with pytest.raises(RuntimeError, match="refused"):
        torch_sdpa.enable()
    assert not torch_sdpa.enabled() and torch.equal(sdpa(q, k, v), before)
    monkeypatch.undo()
    with torch_sdpa.enable():
        assert torch_sdpa.explain(q, k, v).taken


# ---- what is PyTorch's


def unchanged(inputs, *args, **options):
    """The same bits as without us, and the reason for it."""
    torch.manual_seed(0)
    want = gradients(sdpa, inputs, *args, **options)
    with torch_sdpa.enable():
        torch.manual_seed(0)
        for one, other in zip(gradients(sdpa, inputs, *args, **options), want, strict=True):
            assert torch.equal(one, other)
        why = torch_sdpa.explain(*inputs, *args, **options)
    assert not why.taken
    return str(why)


def test_goes_where_it_went_before():
    q, k, v = inputs = qkv()
    assert unchanged(inputs, dropout_p=0.1).startswith("PyTorch's MATH: dropout_p is 0.1")
    double = [x.detach().double().requires_grad_() for x in inputs]
    assert "dtype float64; float32, float16 or bfloat16" in unchanged(double)
    wide = torch.randn(2, 4, 40, 24, requires_grad=True)
    assert "head_dim 16 of query is not 24 of value" in unchanged([q, k, wide])
    three = [x.detach()[0].requires_grad_() for x in inputs]
    if TORCH < (2, 14):
        assert "query has shape (4, 40, 16)" in unchanged(three)
    else:  # PyTorch makes four dimensions of them
        with torch_sdpa.enable():
            same_as_math(three, is_causal=True)
            same_as_math(three, torch.randn(4, 40, 40))
    turned = torch.randn(2, 4, 16, 40).transpose(2, 3).requires_grad_()
    assert "the last dimension of key is not contiguous" in unchanged([q, turned, v])
    learned = torch.zeros(40, 40, requires_grad=True)
    assert "attn_mask requires a gradient" in unchanged(inputs, learned)
    mask = torch.randn(40, 40).t()  # no copy of ours: PyTorch's kernel reads any strides
    assert "attn_mask" in unchanged(inputs, mask)


@ONCE
def test_why_a_gpu_gives_a_call_to_its_math():
    """Told of tensors that only say that they lie on one."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 40, 16, device="cuda") for _ in "qkv")
        mask, wide = torch.zeros(40, 40), torch.empty(2, 4, 40, 32, device="cuda")
    taken = "PyTorch's memory-efficient attention does not take it"
    off = "memory-efficient attention is turned off here"
    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    for backends, why in (([flash], off), ([flash, efficient], taken)):
        with sdpa_kernel(backends):
            assert torch_sdpa._not_flash(q, k, v, mask, 0.0) == f"there is an attn_mask, and {why}"
            of_value = f"head_dim 16 of query is not 32 of value, and {why}"
            assert torch_sdpa._not_flash(q, k, wide, None, 0.0) == of_value


@ONCE
@pytest.mark.parametrize(
    "mask, shape, strides",
    [
        (torch.zeros(40, 304), (40, 304), (304, 1)),
        (torch.zeros(2, 1, 40, 301), (2, 1, 40, 301), (12160, 12160, 304, 1)),
        (torch.zeros(304, 40).t(), (40, 304), (312, 1)),
        (torch.zeros(40, 304, dtype=torch.bool), (40, 304), (304, 1)),
        (torch.zeros(40, 301, dtype=torch.bool), (40, 301), (304, 1)),
        (torch.zeros(304).expand(4, 40, 304), (4, 40, 304), (0, 0, 1)),
        (torch.zeros(301).expand(2**20, 2**20, 301), (2**20, 2**20, 301), (0, 0, 1)),
        (torch.zeros(4, 1, 9).expand(4, 2**40, 9), (4, 1, 9), (16, 16, 1)),
        (torch.zeros(301, dtype=torch.bool).expand(2**20, 2**20, 301), (1, 1, 301), (0, 0, 1)),
        (torch.zeros(40, 1, dtype=torch.bool).expand(40, 304), (40, 304), (304, 1)),
        (torch.zeros(0, 40, 9), (0, 40, 9), (640, 16, 1)),
    ],
)
def test_a_mask_is_told_as_pytorch_hands_it_on(mask, shape, strides):
    """Rows of a multiple of 8, or a copy with such; not of what is expanded."""
    told = torch_sdpa._as_handed_on(mask, torch.float16)
    assert told.shape == shape and told.stride() == strides
    assert told.dtype == (torch.float16 if mask.dtype == torch.bool else mask.dtype)


def test_what_a_context_asks_for_is_pytorchs():
    """MATH is PyTorch's, with its second derivative; so is flash attention that is turned off."""
    inputs = qkv(1, 2, None, 8, 8, 8)
    double = [x.double() for x in qkv(1, 1, None, 3, 4, 4)]
    double = [x.detach().requires_grad_() for x in double]
    with torch_sdpa.enable(), sdpa_kernel(SDPBackend.MATH):
        assert "turned off here" in unchanged(inputs)
        assert torch.autograd.gradgradcheck(sdpa, double)
    with torch_sdpa.enable(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert torch_sdpa.explain(*inputs).taken
        out = sdpa(*inputs)
    with pytest.raises(RuntimeError, match="not implemented"):
        (grad,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
        grad.sum().backward()


def test_wrong_calls_fail_as_before():
    q, k, v = (x.detach() for x in qkv())
    wrong = [
        (q, k[:, :3], v),
        (q, k[..., :8], v),
        (q, k.double(), v),
        (q, k, v, torch.zeros(3, 3)),
    ]
    for args in wrong:
        messages = []
        for on in (False, True):
            with torch_sdpa.enable() if on else contextlib.nullcontext():
                with pytest.raises((RuntimeError, ValueError)) as error:
                    sdpa(*args)
                messages.append(str(error.value))
        assert messages[0] == messages[1]
    with pytest.raises(fs.Error, match=r"query: 3; a tensor"):
        torch_sdpa.explain(3, k, v)


# ---- with the rest of PyTorch


def test_autocast():
    inputs = qkv()
    with torch_sdpa.enable(), torch.autocast("cpu", torch.bfloat16):
        why = torch_sdpa.explain(*inputs)
        assert why.taken and "bf16" in why.kernel
        out = sdpa(*inputs)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, ours_alone(*inputs))


def attend(q, k, v, mask):
    return sdpa(torch.sin(q), k, v, mask) * 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    """Forward and backward; compiled code looks at the strides of what our kernels give."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    inputs, mask = qkv(), torch.randn(40, 40)
    with torch_sdpa.enable():
        got = gradients(compiled, inputs, mask)
    for one, other in zip(got, gradients(attend, inputs, mask), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    # The compiled call reaches what is in place when it runs.
    with count_calls() as calls:
        compiled(*inputs, mask)
    assert calls == [FOR_CPU]


@contextlib.contextmanager
def count_calls():
    """The flash kernels that the dispatcher is asked for."""
    calls = []
    with torch.profiler.profile() as profile:
        yield calls
    calls += [e.name.removeprefix("aten::") for e in profile.events() if FOR_CPU in e.name]


def test_modules():
    """MultiheadAttention, and TransformerEncoderLayer in training."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 20, 32, requires_grad=True)

    def step():
        out = layer(x)
        return out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])

    want = step()
    with torch_sdpa.enable():
        for one, other in zip(step(), want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_between_forward_and_backward():
    """Either backward takes what either forward saved."""
    inputs = qkv()
    want = gradients(sdpa, inputs, is_causal=True)
    for first in (True, False):
        with torch_sdpa.enable() if first else contextlib.nullcontext():
            out = sdpa(*inputs, is_causal=True)
        with contextlib.nullcontext() if first else torch_sdpa.enable():
            grads = torch.autograd.grad(out, inputs, out.detach())
        for one, other in zip(grads, want[1:], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# ---- on and off


def dumped():
    return torch._C._dispatch_dump(f"aten::{FOR_CPU}")


WITHOUT_US = dumped()


def registered():
    return dumped() != WITHOUT_US


def test_on_and_off():
    assert not registered() and not torch_sdpa.enabled()
    torch_sdpa.disable()  # is off
    with torch_sdpa.enable():
        assert registered() and torch_sdpa.enabled()
        with torch_sdpa.enable():
            assert registered()
        assert registered()
    assert not registered() and not torch_sdpa.enabled()
    torch_sdpa.enable()
    assert registered()
    torch_sdpa.enable()
    torch_sdpa.disable()
    assert not registered()
    with pytest.raises(KeyError), torch_sdpa.enable():
        raise KeyError
    assert not registered()
    with torch_sdpa.enable():
        torch_sdpa.disable()
    assert not registered()


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"),
    reason=f"PyTorch {torch.__version__} has no registry of flash attention",
)
def test_pytorchs_own_registry():
    from torch.nn import attention

    assert "flashsdk" in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("flashsdk")
    assert registered() and torch_sdpa.enabled()
    attention.restore_flash_attention_impl()
    assert not registered() and not torch_sdpa.enabled()

    class Other:
        def remove(self):
            pass

    attention.register_flash_attention_impl("other", register_fn=Other)
    attention.activate_flash_attention_impl("other")
    with torch_sdpa.enable():
        assert attention.current_flash_attention_impl() == "flashsdk"
    assert attention.current_flash_attention_impl() == "other"
    torch_sdpa.disable()  # not ours to end
    assert attention.current_flash_attention_impl() == "other"
    attention.restore_flash_attention_impl()


def test_threads_that_call_meanwhile():
    inputs = [x.detach() for x in qkv()]
    want = sdpa(*inputs)
    failures, stop = [], threading.Event()

    def work():
        while not stop.is_set():
            if not torch.allclose(sdpa(*inputs), want, atol=1e-5):
                failures.append("another value")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        with torch_sdpa.enable():
            sdpa(*inputs)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_that_enable_at_once():
    """Ours once stood on top of ours, and the lower ones stayed after the end."""
    chosen = vars(importlib.import_module("torch.nested._internal.sdpa"))
    before, interval = chosen["can_use_flash_attention"], sys.getswitchinterval()

    def work():
        for _ in range(200):
            with torch_sdpa.enable():
                pass
            torch_sdpa.disable()

    threads = [threading.Thread(target=work) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        torch_sdpa.disable()
    assert not registered() and chosen["can_use_flash_attention"] is before


@ONCE
def test_the_script_for_pytorchs_own_tests(tmp_path):
    """It tells what enabling changes from what fails anyway."""
    script = Path(__file__).parents[2] / "scripts" / "torch_tests.py"
    if not script.exists():
        pytest.skip("not a checkout")
    file, record = tmp_path / "test_it.py", tmp_path / "record.json"
    file.write_text(
        "from flashsdk.integrations import torch_sdpa\n"
        "def test_both(): pass\n"
        "def test_neither(): raise ValueError('never')\n"
        "def test_without(): assert not torch_sdpa.enabled()\n"
        "if torch_sdpa.enabled():\n"
        "    def test_new(): pass\n"
        "else:\n"
        "    def test_lost(): pass\n"
    )
    command = [sys.executable, script, file, "--record", record]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = json.loads(record.read_text())
    assert found["without"] == {"passed": 3, "failed": 1, "skipped": 0}
    assert found["with"] == {"passed": 2, "failed": 2, "skipped": 0}
    assert list(found["changed"]) == ["test_it::test_without"]
    assert found["neither"] == {"test_it::test_neither": "ValueError: never"}
    assert found["only_without"] == ["test_it::test_lost"]
    assert found["only_with"] == ["test_it::test_new"]


def test_the_page():
    page = Path(__file__).parents[2] / "docs" / "torch_sdpa.md"
    if not page.exists():
        pytest.skip("not a checkout")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        exec(block, names)
