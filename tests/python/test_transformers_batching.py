"""flashsdk.integrations.transformers: continuous batching, beside each prompt alone and eager."""

import flashsdk as fs
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import transformers_cases as cases  # noqa: E402
from flashsdk.integrations import transformers as door  # noqa: E402
from transformers_cases import DECODERS, greedy, model_of, tokens_of  # noqa: E402

# Of this file too.
one_thread = cases.one_thread

LENGTHS, NEW = (24, 3, 11, 1, 17), 8
PROMPTS = [row[:n] for row, n in zip(tokens_of(5).tolist(), LENGTHS, strict=True)]
# Few tokens and small pages: prompts come in parts, beside tokens of others.
CONFIG = {"max_batch_tokens": 16, "num_blocks": 40, "page_size": 4}

manager = door.batching.ContinuousBatchingManager
old = not hasattr(manager, "switch_to_cb_friendly_attn")
needs_new = pytest.mark.skipif(old, reason="this transformers hands over keys in another way")


@pytest.fixture
def packed(monkeypatch):
    """The lengths of queries of each call."""
    seen = []

    def watched(*args, **options):
        seen.append(args[3].diff().tolist())
        return varlen(*args, **options)

    varlen = door.varlen_attention
    monkeypatch.setattr(door, "varlen_attention", watched)
    return seen


def generate_batch(model, attention_of):
    config = transformers.ContinuousBatchingConfig(**CONFIG)
    options = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1)
    with attention_of(model):
        outputs = model.generate_batch(PROMPTS, options, continuous_batching_config=config)
    by_prompt = {tuple(x.prompt_ids): x.generated_tokens for x in outputs.values()}
    return [by_prompt[tuple(prompt)] for prompt in PROMPTS]


@needs_new
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt_oss"])
def test_the_tokens_of_each_prompt_alone(name, packed):
    model = model_of(DECODERS[name], "eager")
    got = generate_batch(model, door.continuous_batching)
    assert model.config._attn_implementation == "eager"
    for prompt, ours in zip(PROMPTS, got, strict=True):
        alone = greedy(
            DECODERS[name], "eager", input_ids=torch.tensor([prompt]), max_new_tokens=NEW
        )
        assert ours == alone[0, len(prompt) :].tolist()
    assert any(1 in lengths and max(lengths) > 1 for lengths in packed)  # both kinds in one call


def test_an_old_transformers_is_refused(monkeypatch):
    monkeypatch.delattr(manager, "switch_to_cb_friendly_attn", raising=False)
    model = model_of(DECODERS["llama"], "eager")
    with pytest.raises(fs.Unsupported, match=r"^transformers: .*; 5.20 or newer for continuous"):
        with door.continuous_batching(model):
            pass
    assert model.config._attn_implementation == "eager"
