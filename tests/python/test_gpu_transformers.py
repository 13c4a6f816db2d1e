"""flashsdk.integrations.transformers on a GPU, and by the same tests on a CPU, in 16 bits.

Where a test says so the kernels are those of one backend; else sm90 is what the card chooses, as
for a user.
"""

import functools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers_cases as cases  # noqa: E402
from flashsdk.integrations import transformers as door  # noqa: E402
from transformers_cases import (  # noqa: E402
    DECODERS,
    ENCODERS,
    NAME,
    assert_as_good,
    compare,
    model_of,
    padded,
    tokens_of,
)

# Of this file too.
one_thread = cases.one_thread
softmax_in_float64 = cases.softmax_in_float64
kinds = cases.kinds

STEPS = 8


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


def force(monkeypatch, backend):
    """Else such a call of the door is an Error."""
    for name in ("attention", "varlen_attention"):
        function = functools.partial(getattr(door, name), backend=backend)
        monkeypatch.setattr(door, name, function)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2", "gemma2", "gpt_oss"])
def test_logits_and_gradients(place, dtype, monkeypatch, kinds, name, padding):
    force(monkeypatch, place.backend)
    inputs, valid = {"input_ids": tokens_of()}, None
    if padding != "none":
        inputs["attention_mask"] = padded(padding)
        valid = inputs["attention_mask"].bool()
    # Of one model luck may decide: gpt-oss has as many sinks as heads.
    where = {"device": place.device, "seeds": range(3)}
    compare((DECODERS | ENCODERS)[name], inputs, valid, dtype, **where)
    assert set(kinds) == {"band" if valid is None else "packed"}


def generated(model, tokens, mask, **options):
    """The tokens, and the logits that each step chose by: (batch, STEPS, VOCABULARY)."""
    out = model.generate(
        input_ids=tokens, attention_mask=mask, do_sample=False, max_new_tokens=STEPS,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    logits = torch.stack(out.logits, 1)
    assert torch.equal(out.sequences[:, -STEPS:], logits.argmax(-1))
    return out.sequences, logits


def at_once(model, sequences, mask):
    """The same logits of one forward without a cache."""
    mask = torch.cat((mask, mask.new_ones(len(mask), STEPS)), 1)[:, :-1]
    positions = (mask.cumsum(-1) - 1).clamp(0)
    with torch.no_grad():
        out = model(input_ids=sequences[:, :-1], attention_mask=mask, position_ids=positions)
    return out.logits[:, -STEPS:].double()


def check_generation(place, dtype, make, lengths, **options):
    """Not its tokens, as in 16 bits logits may be equal, but the logits of the tokens it chose."""
    tokens, mask = tokens_of(2, 9).to(place.device), padded("left", lengths, 9).to(place.device)
    model = model_of(make, NAME, dtype, device=place.device)
    sequences, logits = generated(model, tokens, mask, **options)
    plain, exact = (
        at_once(model_of(make, "eager", t, device=place.device), sequences, mask)
        for t in (dtype, torch.float64)
    )
    assert_as_good(*({"logits": x.double()} for x in (logits, plain, exact)), dtype)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("lengths", [(9, 9), (9, 5)], ids=["full", "padded"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_generate(place, dtype, monkeypatch, kinds, name, lengths, cache):
    if place.backend == "sm80":
        force(monkeypatch, place.backend)
    options = {"cache_implementation": cache, "disable_compile": True}
    check_generation(place, dtype, DECODERS[name], lengths, **options)
    if cache == "dynamic" or lengths == (9, 9):
        assert ("lengths" in kinds) == (cache == "static"), kinds


def test_generate_as_transformers_compiles_it(place):
    """It captures CUDA graphs of what torch.compile makes of a step."""
    if place.device == "cpu":
        pytest.skip("transformers compiles for a GPU alone")
    if place.shifted:
        pytest.skip("once a card is enough, with the kernels that it chooses")
    options = {"cache_implementation": "static"}
    check_generation(place, torch.bfloat16, DECODERS["llama"], (9, 9), **options)
