"""flashsdk.integrations.transformers: masks of every kind, and what is refused."""

import copy
import random
import re

import flashsdk as fs
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import transformers_cases as cases  # noqa: E402
from flashsdk.integrations import transformers as door  # noqa: E402
from transformers_cases import (  # noqa: E402
    BATCH,
    NAME,
    SEQLEN,
    VOCABULARY,
    attended,
    bert,
    gpt2,
    kind_of,
    llama,
    model_of,
    padded,
    tokens_of,
)

# Of this file too.
one_thread = cases.one_thread
softmax_in_float64 = cases.softmax_in_float64


def test_masks_are_those_of_transformers():
    """Whatever transformers describes: ours beside its own booleans in PyTorch's function."""
    from transformers import masking_utils as masks

    rng = random.Random(0)
    kinds = set()
    for _ in range(150):
        batch, q_length = rng.choice((1, 2, 3)), rng.choice((1, 2, 5, 17, 20))
        kv_offset = rng.choice((0, 0, 3))
        past, unused = rng.choice((0, 0, 4, 9)), rng.choice((0, 0, 6))
        kv_length, q_offset = past + q_length + unused, kv_offset + past
        window = rng.choice((1, 3, 7))
        causal = rng.random() < 0.6
        functions = {
            "plain": masks.causal_mask_function if causal else masks.bidirectional_mask_function,
            "window": masks.sliding_window_causal_mask_function(window)
            if causal
            else masks.sliding_window_bidirectional_mask_function(window),
            "chunks": masks.chunked_causal_mask_function(
                rng.choice((4, 99)), torch.zeros(batch, dtype=torch.long)
            ),
            "of a user": lambda b, h, q, k: (q + k) % 3 != 0,
        }
        shape, padding = rng.choice(list(functions)), None
        if rng.random() < 0.6:
            seen_so_far = q_offset + q_length
            padding = torch.zeros(batch, seen_so_far, dtype=torch.bool)
            for row in padding:
                begin = rng.randrange(seen_so_far)
                row[begin : begin + rng.randrange(1, seen_so_far + 1)] = True
            if rng.random() < 0.2:
                padding = torch.rand(padding.shape) < 0.7
            if rng.random() < 0.3:
                padding[:] = True
        call = {
            "batch_size": batch, "q_length": q_length, "kv_length": kv_length,
            "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": functions[shape],
            "attention_mask": padding, "dtype": torch.float32, "use_vmap": False,
            "local_size": window if shape == "window" else None, "device": "cpu", "config": None,
            "allow_is_causal_skip": causal, "allow_is_bidirectional_skip": not causal,
        }  # fmt: skip
        mask = door.make_mask(**call)
        want = masks.sdpa_mask(
            **{**call, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        ).expand(batch, 1, q_length, kv_length)
        q, k, v = (torch.randn(batch, 2, n, 8) for n in (q_length, kv_length, kv_length))
        out = attended(mask, q, k, v, is_causal=causal)
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=want)
        valid = want.any(-1)[:, 0]
        kinds.add(kind_of(mask))
        if isinstance(mask, door.Seen):
            assert torch.equal(mask.tensor(), want) and mask.shape == want.shape
            if mask.packed and mask.packed.queries:  # of padding there are no queries either
                valid &= padding[:, kv_offset:][:, :q_length]
        exact = exact.transpose(1, 2)
        torch.testing.assert_close(out[valid], exact[valid], atol=2e-6, rtol=1e-5)
    assert kinds == {"packed", "band", "padding", "tensor", "lengths"}


def test_a_mask_is_a_tensor_to_those_who_compute_with_it():
    mask = door.make_mask(
        batch_size=2, q_length=20, kv_length=20, q_offset=0, kv_offset=0,
        mask_function=transformers.masking_utils.causal_mask_function,
        attention_mask=padded("left", (20, 7), 20).bool(), config=None, device="cpu",
    )  # fmt: skip
    assert isinstance(mask, door.Seen) and mask.packed is not None
    tensor = mask.tensor()
    assert tensor.shape == mask.shape == (2, 1, 20, 20) and tensor.dtype == mask.dtype
    assert torch.equal(torch.cat([mask, mask], -1), torch.cat([tensor, tensor], -1))
    assert torch.equal(mask.float(), tensor.float()) and mask.dim() == 4
    assert torch.equal(torch.logical_not(input=mask), ~tensor)
    assert isinstance(mask.to("cpu"), door.Seen) and torch.equal(mask.to("cpu").tensor(), tensor)
    assert torch.equal(mask.to(torch.float32), tensor.float())
    copied = copy.copy(mask)
    q = torch.randn(2, 2, 20, 8)
    assert torch.equal(attended(copied, q, q, q), attended(mask, q, q, q))
    with pytest.raises(fs.Error, match=r"^attention_mask: of 20 queries and 20 keys; 19 and 20$"):
        attended(mask, q[:, :, 1:], q, q)


def test_a_mask_of_one_row_for_all():
    """As PyTorch's function broadcasts it; one of another batch is refused."""
    call = {
        "q_length": 20, "kv_length": 20, "config": None,
        "mask_function": transformers.masking_utils.causal_mask_function,
    }  # fmt: skip
    q = torch.randn(3, 2, 20, 8)
    for n in (17, 5):  # packed; few queries
        queries = q[:, :, :n]
        one = {**call, "q_length": n, "kv_length": n, "batch_size": 1}
        mask = door.make_mask(**one, attention_mask=padded("right", (4,), n).bool())
        out = attended(mask, queries, queries, queries)[:, :4]
        want = attended(None, *[q[:, :, :4]] * 3, is_causal=True)
        torch.testing.assert_close(out, want)
        mask = door.make_mask(
            **{**one, "batch_size": 2}, attention_mask=padded("right", (n, 4), n).bool()
        )
        with pytest.raises(fs.Error, match=r"^attention_mask: of a batch of 2; 1 or 3$"):
            attended(mask, queries, queries, queries)


@pytest.mark.parametrize("seqlen", [24, 5])  # packed; few queries
def test_padding_of_one_row_for_all(seqlen):
    model, tokens = model_of(llama), tokens_of()[:, :seqlen]
    mask = padded("left", (seqlen - 2,), seqlen)
    with torch.no_grad():
        out = model(input_ids=tokens, attention_mask=mask).logits
        want = model(input_ids=tokens, attention_mask=mask.expand(BATCH, -1)).logits
        torch.testing.assert_close(out, want)
        for given in (mask.expand(BATCH + 1, -1), mask[:, None], mask[0]):
            shape = f"shape ({', '.join(map(str, given.shape))}{',' * (given.dim() == 1)})"
            line = f"attention_mask: {shape}; (batch {BATCH}, keys), or four dimensions"
            with pytest.raises(fs.Error, match=f"^{re.escape(line)}$"):
                model(input_ids=tokens, attention_mask=given)


@pytest.mark.parametrize("seqlen", [24, 5, 1])
def test_padding_under_vmap(seqlen):
    """Whose values nobody can read."""
    model, tokens = model_of(llama), tokens_of()[:, :seqlen]
    mask = padded("left", (seqlen, max(seqlen - 2, 1), seqlen), seqlen)

    def one(tokens, mask):
        call = {"input_ids": tokens[None], "attention_mask": mask[None], "use_cache": False}
        return model(**call).logits[0]

    with torch.no_grad():
        out = torch.func.vmap(one)(tokens, mask)
        want = model(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(out[mask.bool()], want[mask.bool()])


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (BATCH, 1, 1, 1), (BATCH, 1, SEQLEN, SEQLEN)])
def test_a_mask_of_integers_is_no_number_of_keys(shape):
    mask = torch.ones(shape, dtype=torch.int32)
    with pytest.raises(fs.Error, match=r"^attention_mask: dtype int32; "):
        model_of(llama)(input_ids=tokens_of(), attention_mask=mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_a_user(kind):
    """4-d ones, which transformers hands on as they are."""
    allowed = torch.rand(BATCH, 1, SEQLEN, SEQLEN) < 0.5
    allowed |= torch.eye(SEQLEN, dtype=torch.bool)
    smallest = torch.finfo(torch.float32).min
    additive = torch.where(allowed, 0.0, smallest)
    eager, ours = model_of(llama, "eager"), model_of(llama)
    with torch.no_grad():
        want = eager(input_ids=tokens_of(), attention_mask=additive).logits
        given = allowed if kind == "bool" else additive
        out = ours(input_ids=tokens_of(), attention_mask=given).logits
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)


def test_a_window_without_a_mask():
    """Models that leave the window to the attention, as flash-attn has it."""
    q, k, v = (torch.randn(2, 2, 20, 8) for _ in range(3))
    away = torch.arange(20)[:, None] - torch.arange(20)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for causal, visible in ((True, (away >= 0) & (away < 4)), (False, away.abs() < 4)):
        out = attended(None, q, k, v, is_causal=causal, sliding_window=4)
        want = sdpa(q, k, v, attn_mask=visible).transpose(1, 2)
        torch.testing.assert_close(out, want)
    out = attended(None, q[:, :, -1:], k, v, is_causal=True, sliding_window=4)
    torch.testing.assert_close(
        out, attended(None, q, k, v, is_causal=True, sliding_window=4)[:, -1:]
    )


# ---- what is refused


def test_what_is_not_supported_is_refused():
    q = torch.randn(1, 2, 5, 8)
    for name, value in (
        ("sinks", torch.zeros(2)),
        ("head_mask", torch.ones(2)),
        ("indices", torch.zeros(1)),
        ("block_table", torch.zeros(1)),
        ("output_attentions", True),
    ):
        with pytest.raises(fs.Error, match=f"^{name}: ") as info:
            attended(None, q, q, q, **{name: value})
        assert info.value.code == "unsupported"
    attended(None, q, q, q, s_aux=None, head_mask=None, output_attentions=False, use_cache=True)
    with pytest.raises(fs.Error, match=r"^key: "):
        attended(None, q, q[..., :4], q)
    with pytest.raises(fs.Error, match=r"^s_aux: shape \(3,\); "):
        attended(None, q, q, q, s_aux=torch.zeros(3))
    with pytest.raises(fs.Error, match=r"^dropout: "):
        attended(None, q, q, q, dropout=1.5)


def test_models_asked_for_weights():
    for make in (llama, gpt2, bert):
        with pytest.raises(fs.Error, match=r"^output_attentions: True; "):
            model_of(make)(input_ids=tokens_of(), output_attentions=True)


def test_a_model_that_does_not_ask_for_attention():
    """BLOOM adds the mask to its own scores: with the mask of another it would not be causal."""
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)
    model = model_of(lambda: (transformers.BloomForCausalLM, config))
    with pytest.raises(fs.Error, match=r"^attention_mask: added to scores by a model; "):
        model(input_ids=tokens_of())
    mask = door.make_mask(
        batch_size=2, q_length=20, kv_length=20, config=None,
        mask_function=transformers.masking_utils.causal_mask_function,
    )  # fmt: skip
    scores = torch.zeros(2, 1, 20, 20)
    for add in (
        lambda: scores + mask,
        lambda: mask + scores,
        lambda: scores.add_(mask[:, :, :, :20]),
        lambda: torch.add(scores, mask),
    ):
        with pytest.raises(fs.Error, match=r"^attention_mask: added to scores by a model; "):
            add()


def test_names():
    assert door.register() == NAME and door.register("another") == "another"
    for wrong in ("flashsdk", "Flash", "a/b", "a:b", "paged|a", "eager", "sdpa", "", None):
        with pytest.raises(fs.Error, match=r"^name: "):
            door.register(wrong)
