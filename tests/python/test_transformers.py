"""flashsdk.integrations.transformers: models beside their own eager attention."""

import re
from pathlib import Path

import flashsdk as fs
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import transformers_cases as cases  # noqa: E402
from flashsdk.integrations import transformers as door  # noqa: E402
from transformers_cases import (  # noqa: E402
    DECODERS,
    ENCODERS,
    NAME,
    bart,
    compare,
    greedy,
    llama,
    model_of,
    padded,
    t5,
    tokens_of,
    vit,
    whisper,
)

# Of this file too.
one_thread = cases.one_thread
softmax_in_float64 = cases.softmax_in_float64
kinds = cases.kinds


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_tokens(name, padding, kinds):
    inputs = {"input_ids": tokens_of()}
    valid = None
    if padding != "none":
        inputs["attention_mask"] = padded(padding)
        valid = inputs["attention_mask"].bool()
    compare((DECODERS | ENCODERS)[name], inputs, valid)
    assert set(kinds) == {"band" if valid is None else "packed"}


def test_16_bits():
    inputs = {"input_ids": tokens_of(), "attention_mask": padded("left")}
    compare(llama, inputs, inputs["attention_mask"].bool(), torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_documents(name, kinds):
    """Several texts in a row, told by position_ids that begin anew."""
    lengths = ((5, 19), (24,), (1, 10, 13))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    inputs = {"position_ids": positions, "use_cache": False}  # with one eager does not look
    compare(DECODERS[name], {"input_ids": tokens_of(), **inputs})
    assert set(kinds) == {"packed"}
    # Each text by itself is the same.
    model = model_of(DECODERS[name])
    with torch.no_grad():
        logits = model(input_ids=tokens_of(), **inputs).logits
        alone = model(input_ids=tokens_of()[2:, 11:]).logits
    torch.testing.assert_close(logits[2:, 11:], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_documents_with_a_new_cache(name):
    """Models make a cache unless told otherwise; then, or under a mask of ones, nobody looks."""
    tokens = tokens_of()
    positions = torch.stack([torch.cat((torch.arange(9), torch.arange(15))), torch.arange(24)])
    model = model_of(DECODERS[name])
    ones = torch.ones_like(tokens[:2])
    static = transformers.StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        alone = [model(input_ids=x).logits for x in (tokens[:1, :9], tokens[:1, 9:], tokens[1:2])]
        want = torch.cat((torch.cat(alone[:2], 1), alone[2]))
        for more in (
            {"use_cache": True},
            {"use_cache": True, "attention_mask": ones},
            {"use_cache": False, "attention_mask": ones},
            {"past_key_values": static},
        ):
            out = model(input_ids=tokens[:2], position_ids=positions, **more).logits
            torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    weights = [x.requires_grad_() for x in model.parameters()]
    out = model(input_ids=tokens[:2], position_ids=positions, use_cache=True).logits
    apart = [model(input_ids=x).logits for x in (tokens[:1, :9], tokens[:1, 9:], tokens[1:2])]
    grads = torch.autograd.grad(out.square().sum(), weights)
    wanted = torch.autograd.grad(sum(x.square().sum() for x in apart), weights)
    for found, exact in zip(grads, wanted, strict=True):
        assert (found - exact).norm() <= 1e-4 * exact.norm() + 1e-3


def test_positions_that_are_of_no_documents():
    """Of another step than one, or of keys that the cache had before: as without them."""
    tokens, model = tokens_of(1), model_of(llama)
    with torch.no_grad():
        for wrong in (torch.arange(24) // 2, torch.arange(0, 48, 2)):
            eager = model_of(llama, "eager")
            inputs = {"input_ids": tokens, "position_ids": wrong[None], "use_cache": True}
            torch.testing.assert_close(
                model(**inputs).logits, eager(**inputs).logits, atol=1e-5, rtol=1e-4
            )
        q, k, v = (torch.randn(1, heads, 24, 8) for heads in (4, 2, 2))
        mask = door.make_mask(
            batch_size=1, q_length=4, kv_length=24, q_offset=20, kv_offset=0, config=None,
            mask_function=transformers.masking_utils.causal_mask_function,
        )  # fmt: skip
        positions = torch.tensor([[20, 21, 0, 1]])
        out, without = (
            cases.attended(mask, q[:, :, 20:], k, v, **more)
            for more in ({"position_ids": positions}, {})
        )
        assert torch.equal(out, without)


def test_positions_are_read_once_a_forward(monkeypatch):
    """As the host waits for them; by a step of decoding not at all."""
    read = []
    host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: read.append(x.shape) or host(x))
    model, tokens = model_of(llama), tokens_of()
    with torch.no_grad():
        first = model(input_ids=tokens, use_cache=True)
        assert len(read) == 1
        model(input_ids=tokens[:, :1], past_key_values=first.past_key_values)
        assert len(read) == 1


def test_lengths_of_the_caller():
    """cu_seq_lens_q and its kin, as DataCollatorWithFlattening gives them."""
    tokens = tokens_of(1)
    cu_seqlens = torch.tensor([0, 5, 24], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    lengths |= {"max_length_q": 19, "max_length_k": 19}
    inputs = {"input_ids": tokens, "use_cache": False}
    inputs["position_ids"] = torch.cat((torch.arange(5), torch.arange(19)))[None]
    model = model_of(llama)
    with torch.no_grad():
        want = model(**inputs).logits
        both = model(**inputs, **lengths).logits
        torch.testing.assert_close(both, want)
        # Where positions say nothing, the lengths do.
        q, k, v = (torch.randn(1, heads, 24, 8) for heads in (4, 2, 2))
        out, _ = door.attend(model, q, k, v, None, is_causal=True, **lengths)
        first, _ = door.attend(model, *(x[:, :, :5] for x in (q, k, v)), None, is_causal=True)
        torch.testing.assert_close(out[:, :5], first)
        with pytest.raises(fs.Error, match=r"^max_length_k: None with cu_seq_lens_q; "):
            door.attend(model, q, k, v, None, **{**lengths, "max_length_k": None})


def test_whisper():
    torch.manual_seed(3)
    sound = torch.randn(2, 8, 40)
    inputs = {"input_features": sound, "decoder_input_ids": tokens_of(2)}
    compare(whisper, inputs)
    inputs["decoder_attention_mask"] = padded("right", (24, 9))
    compare(whisper, inputs, inputs["decoder_attention_mask"].bool())
    inputs = {"input_features": sound, "max_new_tokens": 8, "num_beams": 1}
    want = greedy(whisper, "eager", **inputs)
    assert torch.equal(greedy(whisper, NAME, **inputs), want)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_of_another_text(side, kinds):
    """BART's decoder, all of whose queries see the keys of a padded text."""
    mask = padded(side)
    inputs = {"input_ids": tokens_of(), "attention_mask": mask}
    compare(bart, {**inputs, "decoder_input_ids": tokens_of().flip(1)})
    assert set(kinds) == {"packed", "band"}
    assert torch.equal(greedy(bart, NAME, **inputs), greedy(bart, "eager", **inputs))


def test_vit():
    torch.manual_seed(3)
    compare(vit, {"pixel_values": torch.randn(2, 3, 16, 16)})


# transformers 5.18 is the first whose T5 asks for attention.
asks = hasattr(transformers.models.t5.modeling_t5, "ALL_ATTENTION_FUNCTIONS")
needs_t5 = pytest.mark.skipif(not asks, reason="this transformers' T5 has its own attention")


@needs_t5
@pytest.mark.parametrize("side", ["right", "left"])
def test_t5_without_gradients(side):
    mask = padded(side)
    inputs = {"input_ids": tokens_of(), "attention_mask": mask, "decoder_input_ids": tokens_of()}
    compare(t5, inputs, gradients=False)
    inputs["decoder_attention_mask"] = padded("right")
    compare(t5, inputs, inputs["decoder_attention_mask"].bool(), gradients=False)
    inputs = {"input_ids": tokens_of(), "attention_mask": mask}
    assert torch.equal(greedy(t5, NAME, **inputs), greedy(t5, "eager", **inputs))


@needs_t5
def test_t5_with_gradients_is_refused():
    model = model_of(t5)
    with pytest.raises(fs.Error, match=r"^position_bias: .*gradient; ") as info:
        model(input_ids=tokens_of(), decoder_input_ids=tokens_of())
    assert info.value.code == "unsupported"


def test_dropout():
    def make():
        kind, config = llama()
        config.attention_dropout = 0.5
        return kind, config

    model = model_of(make)
    outs = []
    for training in (False, True, True):
        torch.manual_seed(7)
        model.train(training)
        outs.append(model(input_ids=tokens_of()).logits)
    assert torch.equal(outs[1], outs[2]) and not torch.allclose(outs[0], outs[1])


def test_gradient_checkpointing():
    inputs = {"input_ids": tokens_of(), "attention_mask": padded("right")}
    want = None
    for checkpointing in (False, True):
        model = model_of(llama).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradient = model.get_input_embeddings().weight.grad
        want = gradient if want is None else want
        assert torch.equal(gradient, want)


# ---- the page


def test_the_page():
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    if not page.exists():
        pytest.skip("not a checkout")
    examples = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert examples
    names: dict[str, object] = {}
    for example in examples:
        exec(example, names)
