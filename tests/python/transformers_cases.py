"""Models of small random configurations, and how far from eager attention they may be.

The truth is the same model in float64 with eager attention. By the rule of docs/numerics.md for
whole models, ours may be twice as far from it as eager attention in the same dtype, plus 1e-5: for
the logits and for the gradient of every parameter, by its norm.
"""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from flashsdk.integrations import transformers as door  # noqa: E402
from torch_cases import one_thread  # noqa: E402, F401

NAME = door.register()
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


def gpt_oss():
    # Its grouped products know no float64, which the truth is in.
    config = transformers.GptOssConfig(
        **LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=2, sliding_window=8,
        layer_types=["full_attention", "sliding_attention"], experts_implementation="eager",
    )  # fmt: skip
    return transformers.GptOssForCausalLM, config


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


DECODERS = {f.__name__: f for f in (gpt2, llama, mistral, gemma2, qwen3, gpt_oss)}
ENCODERS = {f.__name__: f for f in (bert, modernbert)}


def model_of(make, attention=NAME, dtype=torch.float32, seed=0, device="cpu"):
    """In evaluation; all models of one make have the same parameters, on any device."""
    kind, config = make()
    torch.manual_seed(seed)
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    model = kind(config)
    for name, p in model.named_parameters():
        if p.dim() > 1 and "relative" not in name:
            p.data.normal_(std=0.15)  # so that scores are of the order of 1
        elif name.endswith("sinks"):
            p.data.normal_()
    return model.to(device, dtype).eval()


def kind_of(mask):
    """How attention takes what make_mask made."""
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.int32:
        return "lengths"
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
    weights = torch.randn(logits.shape).to(logits)
    names, leaves = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad))
    found = torch.autograd.grad((logits * weights).sum(), leaves, allow_unused=True)
    modules: dict[str, list[torch.Tensor]] = {}
    for name, gradient in zip(names, found):
        if gradient is not None:
            modules.setdefault(name.rpartition(".")[0], []).append(gradient.double().flatten())
    return {"logits": logits.detach().double(), **{k: torch.cat(x) for k, x in modules.items()}}


def compare(
    make, inputs, valid=None, dtype=torch.float32, gradients=True, *, device="cpu", seeds=(0,)
):
    """The errors of the models of all seeds count as one."""
    inputs = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
    valid = None if valid is None else valid.to(device)

    def of(attention, dtype):
        models = (model_of(make, attention, dtype, seed, device) for seed in seeds)
        found = [results(model, inputs, valid, gradients) for model in models]
        return {name: torch.cat([one[name].flatten() for one in found]) for name in found[0]}

    truth, eager, ours = of("eager", torch.float64), of("eager", dtype), of(NAME, dtype)
    assert truth.keys() == ours.keys() and len(truth) > (10 if gradients else 0)
    assert_as_good(ours, eager, truth, dtype)


def assert_as_good(ours, eager, truth, dtype):
    """By name: ours is at most twice as far from the truth as eager attention."""
    bad = {}
    for name, want in truth.items():
        error, yardstick = ((x[name] - want).norm().item() for x in (ours, eager))
        # In 16 bits eager attention may be right by luck in a small parameter: 2^-9 of it.
        luck = 1e-5 if dtype == torch.float32 else 2**-9
        allowed = 2 * yardstick + luck * want.norm().item() + 1e-9
        if not error <= allowed:
            bad[name] = error, allowed
    assert not bad, bad


def greedy(make, attention, **inputs):
    model = model_of(make, attention)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    return model.generate(**{**options, **inputs})


def attended(mask, q, k, v, **options):
    module = torch.nn.Module()
    return door.attend(module, q, k, v, mask, **options)[0]
