"""Every argument of every public function of the adapter, given what it is not: one flashsdk.Error
that names it. Also gradients that would be lost, and batches without a sample."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashsdk as fs  # noqa: E402
import flashsdk.torch as adapter  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

# torch's own, when it loads its forward-mode derivatives.
pytestmark = [
    pytest.mark.usefixtures("torch_way"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]

# explain takes them with their arguments, and checks its own in test_log.py.
FUNCTIONS = [name for name in adapter.__all__ if name != "explain"]
BATCH, SEQLEN, HEADS, DIM = 2, 6, 2, 8
OFFSETS = torch.tensor([0, 2, 6], dtype=torch.int32)

# Of what an argument may not be, by its kind.
LONG = np.zeros((40, 40))  # whose repr has many lines
NO_TENSORS = [3, "a", [1.0], np.zeros(3, np.float32), LONG, torch.tensor(1.0), object()]


class Unreadable:
    """What must not reach the caller as its own exception."""

    @property
    def dtype(self):
        raise RuntimeError("of the caller's type")


MASKED = np.ma.array(1, mask=True)
NO_NUMBERS = [
    *["a", True, np.False_, torch.tensor(True), b"1", [1.0, 2.0]],
    *[np.array("1.5"), np.array(True, dtype=object), np.void(b"1"), memoryview(b"1")],
    *[np.ma.masked, MASKED, Unreadable(), np.complex64(1j), torch.ones(40, 2), LONG, object(), 1j],
]
NO_INTEGERS = [
    *[6.0, "a", 2**63, True, np.True_, np.array(True), torch.tensor(True), torch.ones(40, 40)],
    *[MASKED, Unreadable()],
]
NO_FLAGS = ["no", "x\ny", [True], LONG]
WRONG = {
    argument: wrong
    for arguments, wrong in {
        "q k v query key value qkv kv": [None, *NO_TENSORS],
        "cu_seqlens_q cu_seqlens_k cu_seqlens": [None, [0, 6], *NO_TENSORS],
        "bias alibi_slopes attn_mask": NO_TENSORS[:-2],
        "sink seqused_q seqused_k k_descale v_descale": NO_TENSORS,
        "k_cache v_cache": [None, *NO_TENSORS],
        "rotary_cos rotary_sin cache_batch_idx cache_leftpad": NO_TENSORS,
        "cache_seqlens": [*NO_TENSORS[1:], 7, -1],
        "rotary_interleaved q_advances return_softmax_lse": [None, *NO_FLAGS],
        "num_splits": [0, -1, 2**31, *NO_INTEGERS],
        "block_table": ["a", LONG, torch.zeros(3, 1, dtype=torch.int32)],
        "softmax_scale scale": NO_NUMBERS,
        "softcap dropout_p": [None, *NO_NUMBERS],
        "max_seqlen_q max_seqlen_k max_seqlen": [None, *NO_INTEGERS],
        "seed": ["a", 1.5, -1, 2**64, True, torch.tensor(True), LONG],
        "causal is_causal enable_gqa return_lse return_attn_probs": [None, *NO_FLAGS],
        "deterministic": NO_FLAGS,
        "window_size": [
            *[None, (None, 3), "ab", 5, (1,), (1, 2, 3), (1.5, 2), (True, 2), LONG],
            *[(torch.tensor(True), 2), (1, True)],
        ],
        "backend": [3, b"cpu", "tpu", "x\ny", "x" * 200, LONG],
        "mask": ["causal", 3, LONG, torch.ones(40, 40)],
    }.items()
    for argument in arguments.split()
}


def arguments(name):
    """Those that the function needs, and that work."""
    shape = (SEQLEN, HEADS, DIM) if "varlen" in name else (BATCH, SEQLEN, HEADS, DIM)
    x = torch.randn(shape)
    values = dict.fromkeys(("q", "k", "v", "query", "key", "value"), x)
    values |= {"k_cache": x.clone(), "v_cache": x.clone()}
    values["seqused_k"] = torch.zeros(BATCH, dtype=torch.int32)
    values |= {"qkv": torch.stack((x, x, x), -3), "kv": torch.stack((x, x), -3)}
    values |= dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"), OFFSETS)
    values |= dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), SEQLEN)
    parameters = inspect.signature(getattr(adapter, name)).parameters.values()
    return {p.name: values[p.name] for p in parameters if p.default is p.empty}


def refused(name, match, code="invalid_argument", **changes):
    with pytest.raises(fs.Error, match=match) as caught:
        getattr(adapter, name)(**arguments(name) | changes)
    line = str(caught.value)
    assert "\n" not in line and "; " in line
    assert len(line) < 400
    assert code in (None, caught.value.code)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_types_are_named(name):
    function = getattr(adapter, name)
    function(**arguments(name))
    for argument, parameter in inspect.signature(function).parameters.items():
        for wrong in WRONG[argument]:
            if type(wrong) is type(parameter.default) and wrong == parameter.default:
                continue  # right for this function
            refused(name, f"^{argument}: ", None, **{argument: wrong})


X = torch.zeros(BATCH, SEQLEN, HEADS, DIM)


@pytest.mark.parametrize(
    "argument, wrong",
    [
        *[("seed", wrong) for wrong in (-1, 2**64, 1.5, "a", True)],
        *[("max_seqlen_q", wrong) for wrong in (1.5, "a", 2**63, -1, 3, True, None)],
        *[(name, x) for name in "qkv" for x in (X[0, 0], X[None], X[0, 0, 0])],
        *[("backend", wrong) for wrong in (3, "tpu", "sm90", LONG)],
        *[("mask", wrong) for wrong in ("causal", LONG)],
        *[("softcap", wrong) for wrong in ("a", -1.0, 1e39, True, np.True_)],
        *[("deterministic", wrong) for wrong in (1, "no")],
    ],
    ids=lambda x: str(getattr(x, "shape", x)),
)
def test_the_core_says_the_same(argument, wrong):
    """Of a mistake that both check, in the same words."""

    def line(function, name):
        with pytest.raises(fs.Error) as caught:
            function(**arguments(name) | {argument: wrong})
        return str(caught.value), caught.value.code

    pairs = [(fs.mha_varlen_fwd, "varlen_attention")]
    if argument != "max_seqlen_q":
        pairs.append((fs.mha_fwd, "attention"))
    for core, name in pairs:
        assert line(core, name) == line(getattr(adapter, name), name)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_without_strides(name):
    first = next(iter(arguments(name)))
    nested = torch.nested.nested_tensor([torch.randn(4, 2, 8), torch.randn(5, 2, 8)])
    refused(name, f"^{first}: a nested tensor; ", "unsupported", **{first: nested})
    sparse = arguments(name)[first].to_sparse()
    refused(name, f"^{first}: a tensor of layout", "unsupported", **{first: sparse})


def test_numbers_may_be_numpys_or_tensors():
    x = torch.randn(BATCH, SEQLEN, HEADS, DIM)
    want = adapter.attention(x, x, x, softmax_scale=0.5, softcap=2.0)
    for scale, softcap in ((np.float32(0.5), np.int64(2)), (torch.tensor(0.5), torch.tensor([2]))):
        assert torch.equal(adapter.attention(x, x, x, softmax_scale=scale, softcap=softcap), want)
    flat = x[0]
    options = {"deterministic": np.True_, "return_lse": np.False_}
    lengths = (OFFSETS, OFFSETS, np.int32(SEQLEN), torch.tensor(SEQLEN))
    out = adapter.varlen_attention(flat, flat, flat, *lengths, **options)
    assert torch.equal(out, adapter.varlen_attention(flat, flat, flat, OFFSETS, OFFSETS, 6, 6))


@pytest.mark.parametrize("argument", ["softmax_scale", "softcap", "dropout_p"])
def test_numbers_that_require_gradients(argument):
    value = torch.tensor(0.5, requires_grad=True)
    for name in ("attention", "varlen_attention", "flash_attn_func"):
        match = f"^{argument}: a tensor that requires a gradient"
        refused(name, match, "unsupported", **{argument: value})
        with torch.no_grad():
            getattr(adapter, name)(**arguments(name), **{argument: value})
    if argument == "softmax_scale":
        match = "^scale: a tensor that requires a gradient"
        refused("scaled_dot_product_attention", match, "unsupported", scale=value)


WRAPPED = {
    "vmap": lambda f, q, x: torch.func.vmap(f)(q, x),
    "vmap in grad": lambda f, q, x: torch.func.grad(lambda x: torch.func.vmap(f)(q, x).sum())(x),
    "functionalize": lambda f, q, x: torch.func.functionalize(f)(q[0], x[0]),
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("argument", ["bias", "alibi_slopes"])
def test_no_gradient_of_what_a_transform_wraps(argument, wrapped):
    """Inside of it such a tensor says that it requires none."""
    q = torch.randn(2, BATCH, SEQLEN, HEADS, DIM)
    shape = (HEADS,) if argument == "alibi_slopes" else (1, 1, SEQLEN, SEQLEN)
    constant = torch.rand(2, *shape)

    def function(q, x):
        return adapter.attention(q, q, q, **{argument: x})

    if wrapped is not WRAPPED["vmap in grad"]:  # which asks for the gradient
        wrapped(function, q, constant)
    with pytest.raises(fs.Error, match=f"^{argument}: a tensor that requires a gradient") as caught:
        wrapped(function, q.clone().requires_grad_(), constant.clone().requires_grad_())
    assert caught.value.code == "unsupported"


# ---- forward-mode differentiation


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_forward_mode(name, recorded):
    first = next(iter(arguments(name)))
    given = arguments(name)[first]
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        getattr(adapter, name)(**arguments(name))  # without tangents all is as ever
        dual = forward_ad.make_dual(given, torch.ones_like(given))
        refused(name, f"^{first}: a tensor with a tangent", "unsupported", **{first: dual})


def test_no_forward_mode_of_other_arguments():
    x = torch.randn(BATCH, SEQLEN, HEADS, DIM)
    with forward_ad.dual_level():
        for argument, value in (
            ("bias", torch.zeros(1, 1, SEQLEN, SEQLEN)),
            ("alibi_slopes", torch.ones(HEADS)),
            ("softmax_scale", torch.tensor(0.5)),
        ):
            dual = forward_ad.make_dual(value, torch.ones_like(value))
            match = f"^{argument}: a tensor with a tangent"
            refused("attention", match, "unsupported", **{argument: dual})
        mask = forward_ad.make_dual(torch.zeros(HEADS, HEADS), torch.ones(HEADS, HEADS))
        match = "^attn_mask: a tensor with a tangent"
        # Heads come before the sequence there.
        refused("scaled_dot_product_attention", match, "unsupported", attn_mask=mask)
        q = x.clone().requires_grad_()
        out = adapter.attention(q, x, x)
        dual = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(fs.Error, match=r"^dout: a tensor with a tangent"):
            torch.autograd.grad(out, q, dual)


@pytest.mark.parametrize("recorded", [True, False])
def test_no_forward_mode_in_functorch(recorded):
    x = torch.randn(BATCH, SEQLEN, HEADS, DIM)

    def over_batch(q):
        return torch.func.vmap(lambda q, k: adapter.attention(q[None], k[None], k[None]))(q, x)

    with torch.set_grad_enabled(recorded):
        for function in (lambda q: adapter.attention(q, x, x), over_batch):
            with pytest.raises(fs.Error, match=r"^q: a tensor with a tangent") as caught:
                torch.func.jvp(function, (x,), (torch.ones_like(x),))
            assert caught.value.code == "unsupported"


def attend_to_itself(x):
    return adapter.attention(x, x, x)


def raw(x):
    none = (None,) * 4
    return torch.ops.flashsdk.mha_fwd(x, x, x, *none, [], None, 0.0, 0.0, False, "")[0]


TO_THE_OPERATOR = {
    "the operator": lambda x: raw,
    "jit.trace": lambda x: torch.jit.trace(attend_to_itself, x),
    "eager": lambda x: torch.compile(attend_to_itself, backend="eager"),
    "aot_eager": lambda x: torch.compile(attend_to_itself, backend="aot_eager"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("made", TO_THE_OPERATOR.values(), ids=TO_THE_OPERATOR)
def test_no_forward_mode_of_the_operators(made, recorded):
    """Where a call goes straight to them. TorchScript puts its own error around ours, and the
    compiler has one for what it records a gradient of itself."""
    torch._dynamo.reset()
    x = torch.randn(BATCH, SEQLEN, HEADS, DIM)
    function = made(x)
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        torch.testing.assert_close(function(x), attend_to_itself(x))
        dual = forward_ad.make_dual(x.clone().requires_grad_(recorded), torch.ones_like(x))
        match = "q: a tensor with a tangent|must implement the jvp function"
        with pytest.raises((fs.Error, RuntimeError), match=match):
            function(dual)


def test_no_forward_mode_inside_of_a_compiled_function():
    x = torch.randn(BATCH, SEQLEN, HEADS, DIM)

    def function(x):
        return torch.func.jvp(attend_to_itself, (x,), (x,))

    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="q: a tensor with a tangent"):
            torch.compile(function, backend=backend)(x)


# ---- no sample


def test_vmap_over_no_sample():
    q = torch.randn(0, BATCH, SEQLEN, HEADS, DIM)
    k = torch.randn(BATCH, SEQLEN, HEADS, DIM)
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            out = torch.func.vmap(lambda q: adapter.attention(q, k, k))(q)
            assert out.shape == q.shape
    flat = q[:, 0]
    lengths = (OFFSETS, OFFSETS, SEQLEN, SEQLEN)
    out, lse = torch.func.vmap(
        lambda q: adapter.varlen_attention(q, q, q, *lengths, return_lse=True)
    )(flat)
    assert out.shape == flat.shape and lse.shape == (0, HEADS, SEQLEN)


INTEGERS = {
    "seed": lambda true: fs.mha_fwd(*[torch.randn(1, 4, 1, 8)] * 3, seed=true),
    "offset": lambda true: fs.mha_fwd(*[torch.randn(1, 4, 1, 8)] * 3, offset=true),
    "left": lambda true: fs.Band(left=true),
    "seqlen_q": lambda true: fs.layouts.dense(true, 4, 16),
    "n": fs.set_num_threads,
}


@pytest.mark.parametrize("name, call", INTEGERS.items(), ids=INTEGERS)
def test_tensors_of_a_bool_are_no_integers(name, call):
    """Though to Python, PyTorch's are."""
    with pytest.raises(fs.Error, match=rf"^{name}: tensor\(True\); "):
        call(torch.tensor(True))
