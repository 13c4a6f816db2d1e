"""flashsdk.integrations.transformers: generate and its caches, and torch.compile."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers_cases as cases  # noqa: E402
from transformers_cases import (  # noqa: E402
    DECODERS,
    ENCODERS,
    NAME,
    gemma2,
    greedy,
    llama,
    mistral,
    model_of,
    padded,
    tokens_of,
)

# Of this file too.
one_thread = cases.one_thread
softmax_in_float64 = cases.softmax_in_float64
kinds = cases.kinds


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache):
    for mask in (padded("left", (9, 5), 9), torch.ones(2, 9, dtype=torch.long)):
        inputs = {"input_ids": tokens_of(2, 9), "attention_mask": mask}
        inputs["cache_implementation"] = cache
        want = greedy(DECODERS[name], "eager", **inputs)
        assert torch.equal(greedy(DECODERS[name], NAME, **inputs), want)


def test_a_static_cache_has_lengths(kinds):
    """Not a mask over all of its places, but where there is padding or a window hides some."""
    inputs = {"input_ids": tokens_of(2, 9), "cache_implementation": "static"}
    for name, steps in (("llama", {"lengths"}), ("mistral", {"lengths", "tensor"})):
        kinds.clear()
        want = greedy(DECODERS[name], "eager", **inputs)
        assert torch.equal(greedy(DECODERS[name], NAME, **inputs), want)
        assert set(kinds) - {"band"} <= steps
        assert "lengths" in kinds or name == "mistral"
    kinds.clear()
    mask = padded("left", (9, 5), 9)
    want = greedy(llama, "eager", attention_mask=mask, **inputs)
    assert torch.equal(greedy(llama, NAME, attention_mask=mask, **inputs), want)
    assert "lengths" not in kinds


def test_a_cache_that_is_filled_in_parts(kinds):
    """Several queries behind keys of before, as in speculative decoding; padded as well."""
    for make in (llama, mistral):
        for mask in (None, padded("left")):
            outs = []
            for attention in ("eager", NAME):
                model = model_of(make, attention)
                with torch.no_grad():
                    part = None if mask is None else mask[:, :15]
                    begun = model(input_ids=tokens_of()[:, :15], attention_mask=part)
                    cache = begun.past_key_values
                    # A position is that of a valid token, as generate counts.
                    more = {}
                    if mask is not None:
                        more["position_ids"] = (mask.cumsum(-1) - 1).clamp(0)[:, 15:]
                    rest = model(
                        input_ids=tokens_of()[:, 15:],
                        attention_mask=mask,
                        past_key_values=cache,
                        **more,
                    )
                outs.append(rest.logits)
            valid = slice(None) if mask is None else mask[:, 15:].bool()
            torch.testing.assert_close(outs[1][valid], outs[0][valid], atol=1e-5, rtol=1e-4)
    assert {"band", "padding"} <= set(kinds)


# ---- torch.compile


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_compiled(name):
    """In one graph: no graph breaks, whether padded or not. Traced, not generated as code."""
    make = (DECODERS | ENCODERS)[name]
    for mask in (None, padded("left")) if name == "llama" else (padded("right"),):
        inputs = {"input_ids": tokens_of(), "attention_mask": mask}
        valid = slice(None) if mask is None else mask.bool()
        model = model_of(make)
        want = model(**inputs).logits[valid]
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        out = compiled(**inputs).logits[valid]
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
        parameters = list(model.parameters())
        gradients = (
            torch.autograd.grad(x.square().sum(), parameters, allow_unused=True)
            for x in (out, want)
        )
        for a, b in zip(*gradients, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


def test_compiled_generation():
    """With a static cache two graphs serve all steps: of the text, and of a token."""
    inputs = {"input_ids": tokens_of(2, 9), "attention_mask": padded("left", (9, 5), 9)}
    inputs["cache_implementation"] = "static"
    want = greedy(gemma2, "eager", **inputs)
    model, graphs = model_of(gemma2), []

    def count(graph, _):
        graphs.append(graph)
        return graph

    model.forward = torch.compile(model.forward, backend=count, fullgraph=True)
    out = model.generate(**inputs, do_sample=False, max_new_tokens=12, pad_token_id=0)
    assert torch.equal(out, want)
    assert len(graphs) == 2
