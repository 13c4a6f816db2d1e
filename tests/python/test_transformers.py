"""flashsdk.integrations.transformers: models of small random configurations beside eager attention.

The truth is the same model in float64 with eager attention. By the rule of docs/numerics.md for
whole models, ours may be twice as far from it as eager attention in the same dtype, plus 1e-5: for
the logits and for the gradient of every parameter, by its norm.
"""

import copy
import random
import re
from pathlib import Path

import flashsdk as fs
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from flashsdk.integrations import transformers as door  # noqa: E402

NAME = door.register()
ROOT = Path(__file__).parents[2]
BATCH, SEQLEN, VOCABULARY = 3, 24, 64
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
BERT = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}


def gpt2():
    sizes = {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **tokens, **off)
    return transformers.GPT2LMHeadModel, config


def bert():
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM, transformers.BertConfig(**BERT, **off)


def modernbert():
    config = transformers.ModernBertConfig(
        **BERT, global_attn_every_n_layers=2, local_attention=8, cls_token_id=1, sep_token_id=2
    )
    return transformers.ModernBertForMaskedLM, config


def llama():
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**LLAMA)


def mistral():
    config = transformers.MistralConfig(**LLAMA, sliding_window=6)
    return transformers.MistralForCausalLM, config


def gemma2():
    config = transformers.Gemma2Config(
        **LLAMA, head_dim=8, sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=8
    )
    return transformers.Gemma2ForCausalLM, config


def qwen3():
    return transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**LLAMA, head_dim=16)


def t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=None, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration, config


def bart():
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, dropout=0.0,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, forced_eos_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration, config


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, encoder_layers=2, encoder_attention_heads=4,
        decoder_layers=2, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        d_model=32, max_source_positions=20, max_target_positions=64, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration, config


def vit():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        image_size=16, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification, config


DECODERS = {f.__name__: f for f in (gpt2, llama, mistral, gemma2, qwen3)}
ENCODERS = {f.__name__: f for f in (bert, modernbert)}


def model_of(make, attention=NAME, dtype=torch.float32, seed=0):
    """In evaluation; all models of one make have the same parameters."""
    kind, config = make()
    torch.manual_seed(seed)
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    model = kind(config)
    for name, p in model.named_parameters():
        if p.dim() > 1 and "relative" not in name:
            p.data.normal_(std=0.15)  # so that scores are of the order of 1
    return model.to(dtype).eval()


def kind_of(mask):
    """How attention takes what make_mask made."""
    if not isinstance(mask, door.Seen) or not mask.known:
        return "tensor"
    return "packed" if mask.packed else "band" if mask.padding is None else "padding"


@pytest.fixture
def kinds(monkeypatch):
    """Of the masks that the layers of a model were given."""
    given = []

    def attend(module, query, key, value, attention_mask, **rest):
        given.append(kind_of(attention_mask))
        return door.attend(module, query, key, value, attention_mask, **rest)

    transformers.AttentionInterface.register(NAME, attend)
    yield given
    transformers.AttentionInterface.register(NAME, door.attend)


def tokens_of(batch=BATCH, seqlen=SEQLEN):
    torch.manual_seed(1)
    return torch.randint(3, VOCABULARY, (batch, seqlen))


def padded(side, lengths=(SEQLEN, 7, 17), seqlen=SEQLEN):
    mask = torch.zeros(len(lengths), seqlen, dtype=torch.long)
    for row, n in zip(mask, lengths, strict=True):
        row[slice(0, n) if side == "right" else slice(seqlen - n, seqlen)] = 1
    return mask


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Nothing here is large enough for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def softmax_in_float64(monkeypatch):
    """Models' own attention asks for float32 softmax, in which a float64 mask is -inf."""
    softmax = torch.nn.functional.softmax

    def in_double(x, dim=None, dtype=None, **rest):
        return softmax(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype, **rest)

    monkeypatch.setattr(torch.nn.functional, "softmax", in_double)


def results(model, inputs, valid, gradients=True):
    """The logits at valid places, and of their weighted sum the gradient of every parameter.

    A module's parameters count as one: the gradient of a key's bias is 0, and all of it error.
    """
    for name, x in inputs.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            inputs = {**inputs, name: x.to(model.dtype)}
    with torch.set_grad_enabled(gradients):
        logits = model(**inputs).logits
        logits = logits if valid is None else logits[valid]
    if not gradients:
        return {"logits": logits.double()}
    torch.manual_seed(2)
    weights = torch.randn(logits.shape).to(logits.dtype)
    names, leaves = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
    found = torch.autograd.grad((logits * weights).sum(), leaves, allow_unused=True)
    modules: dict[str, list[torch.Tensor]] = {}
    for name, gradient in zip(names, found):
        if gradient is not None:
            modules.setdefault(name.rpartition(".")[0], []).append(gradient.double().flatten())
    return {"logits": logits.detach().double(), **{k: torch.cat(x) for k, x in modules.items()}}


def compare(make, inputs, valid=None, dtype=torch.float32, gradients=True):
    truth = results(model_of(make, "eager", torch.float64), inputs, valid, gradients)
    eager = results(model_of(make, "eager", dtype), inputs, valid, gradients)
    ours = results(model_of(make, NAME, dtype), inputs, valid, gradients)
    assert truth.keys() == ours.keys() and len(truth) > (10 if gradients else 0)
    bad = {}
    for name, want in truth.items():
        error, yardstick = ((x[name] - want).norm().item() for x in (ours, eager))
        # In 16 bits eager attention may be right by luck in a small parameter: 2^-9 of it.
        luck = 1e-5 if dtype == torch.float32 else 2**-9
        allowed = 2 * yardstick + luck * want.norm().item() + 1e-9
        if not error <= allowed:
            bad[name] = error, allowed
    assert not bad, bad


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
    inputs = {"position_ids": positions, "use_cache": False}  # with a cache they say nothing
    compare(DECODERS[name], {"input_ids": tokens_of(), **inputs})
    assert set(kinds) == {"packed"}
    # Each text by itself is the same.
    model = model_of(DECODERS[name])
    with torch.no_grad():
        logits = model(input_ids=tokens_of(), **inputs).logits
        alone = model(input_ids=tokens_of()[2:, 11:]).logits
    torch.testing.assert_close(logits[2:, 11:], alone, atol=1e-5, rtol=1e-4)


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


def greedy(make, attention, **inputs):
    model = model_of(make, attention)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    return model.generate(**{**options, **inputs})


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache):
    for mask in (padded("left", (9, 5), 9), torch.ones(2, 9, dtype=torch.long)):
        inputs = {"input_ids": tokens_of(2, 9), "attention_mask": mask}
        inputs["cache_implementation"] = cache
        want = greedy(DECODERS[name], "eager", **inputs)
        assert torch.equal(greedy(DECODERS[name], NAME, **inputs), want)


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


# ---- masks


def attended(mask, q, k, v, **options):
    module = torch.nn.Module()
    return door.attend(module, q, k, v, mask, **options)[0]


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
    assert kinds == {"packed", "band", "padding", "tensor"}


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


# ---- what is refused


def test_what_is_not_supported_is_refused():
    q = torch.randn(1, 2, 5, 8)
    for name, value in (
        ("s_aux", torch.zeros(2)),
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
    with pytest.raises(fs.Error, match=r"^dropout: "):
        attended(None, q, q, q, dropout=1.5)


def test_models_with_sinks_or_weights():
    config = transformers.GptOssConfig(
        **LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    model = model_of(lambda: (transformers.GptOssForCausalLM, config))
    with pytest.raises(fs.Error, match=r"^s_aux: attention sinks; "):
        model(input_ids=tokens_of())
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


# ---- the page


def test_the_page():
    page = ROOT / "docs" / "transformers.md"
    if not page.exists():
        pytest.skip("not a checkout")
    examples = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert examples
    names: dict[str, object] = {}
    for example in examples:
        exec(example, names)
