"""examples/serve.py: a batch that changes at every step gives the tokens of each request alone."""

import importlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

tokenizers = pytest.importorskip("tokenizers")

import transformers_cases as cases  # noqa: E402
from transformers_cases import DECODERS, VOCABULARY, greedy, model_of  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "examples" / "serve.py"
if not SCRIPT.exists():
    pytest.skip("not a checkout", allow_module_level=True)

# Of this file too.
one_thread = cases.one_thread

# So few places and pages that requests wait for both.
SMALL = ["--requests", "6", "--rate", "1000", "--max-batch", "3", "--max-tokens", "24"]
SMALL += ["--page-size", "4", "--chunk", "8", "--pages", "88", "--device", "cpu"]


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        return importlib.import_module("serve")


@pytest.fixture
def folder(tmp_path):
    """A model as transformers keeps it."""
    model_of(DECODERS["llama"], "eager").save_pretrained(tmp_path)
    return tmp_path


def row(printed: str, name: str) -> str:
    (line,) = (x for x in printed.splitlines() if x.startswith(name))
    return line.removeprefix(name).strip()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_check(dtype, example, capsys, folder):
    example.main([*SMALL, "--model", str(folder), "--check", "--dtype", dtype])
    printed, progress = capsys.readouterr()
    assert "6 of 6 requests have the tokens that each has alone" in printed
    assert int(row(printed, "prompt tokens shared")) > 0
    assert int(row(printed, "new tokens a second")) > 0
    assert row(printed, "time to first token, ms")
    assert "6 of 6 requests, 0 at work, 0 waiting" in progress


def test_check_finds_a_wrong_page(example, capsys, folder, monkeypatch):
    share = example.Pages.share
    monkeypatch.setattr(
        example.Pages, "share", lambda self, tokens, pages: share(self, tokens, pages[::-1])
    )
    with pytest.raises(SystemExit) as info:
        example.main([*SMALL, "--model", str(folder), "--check"])
    assert info.value.code == 1
    assert "6 of 6" not in capsys.readouterr().out
    example.main([*SMALL, "--model", str(folder), "--check", "--no-sharing"])  # none is shared


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_the_tokens_are_those_of_generate(name, example):
    """With eager attention: windows, softcap and sinks reach the kernels."""
    lengths = (24, 3, 17, 1, 9)
    prompts = [torch.randint(3, VOCABULARY, (n,)).tolist() for n in lengths]
    sizes = {"pages": 40, "page_size": 4, "max_pages": 9, "max_batch": 4}
    paged = example.PagedModel(model_of(DECODERS[name], "eager"), **sizes)
    for x in (x for pair in paged.cache for x in pair):
        x.fill_(torch.nan)  # what nobody has written reaches nobody
    server = example.Server(paged, max_batch=4, max_tokens=16, chunk=8, share=True)
    done = example.serve(server, [example.Request(prompt, 12) for prompt in prompts], show=False)
    assert len(done) == len(prompts)
    for x in done:
        alone = greedy(DECODERS[name], "eager", input_ids=torch.tensor([x.request.prompt]))
        assert x.tokens == alone[0].tolist()


def sizes_of(family):
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCABULARY, "intermediate_size": 64, "pad_token_id": 0}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    routed = {"num_experts": 2, "num_experts_per_tok": 1}
    experts = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
    return sizes | {
        "deepseek_v3": {**latent, **experts, "v_head_dim": 12, "moe_intermediate_size": 32},
        "deepseek_v32": {
            **latent, **experts, "v_head_dim": 12, "moe_intermediate_size": 32,
            "index_n_heads": 2, "index_head_dim": 16,
        },
        "diffllama": {"num_key_value_heads": 2},
        "doge": {"num_key_value_heads": 2},
        "electra": {"embedding_size": 32},
        "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
        "llama4_text": {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32},
        "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2} | routed,
    }[family]  # fmt: skip


def model_like(family):
    """As small ones of transformers as these families have."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes_of(family), eos_token_id=None)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_keys_and_values_of_unequal_head_dims(example):
    model = model_like("deepseek_v3")
    prompt = torch.randint(3, VOCABULARY, (1, 11))
    alone = model.generate(prompt, max_new_tokens=12, do_sample=False)
    paged = example.PagedModel(model, pages=10, page_size=4, max_pages=9, max_batch=1)
    assert [(k.shape[3], v.shape[3]) for k, v in paged.cache] == [(16, 12)] * 2
    server = example.Server(paged, max_batch=1, max_tokens=16, chunk=8, share=True)
    (done,) = example.serve(server, [example.Request(prompt[0].tolist(), 12)], show=False)
    assert done.tokens == alone[0].tolist()


@pytest.mark.parametrize(
    "family, line",
    [
        ("gpt_neo", "GPTNeoForCausalLM: not one call of AttentionInterface a layer, causal and"),
        ("diffllama", "DiffLlamaForCausalLM: not one call"),  # it makes two
        ("doge", "DogeForCausalLM: not one call"),  # it makes a mask in each layer
        ("electra", "ElectraForCausalLM: not one call"),  # it is an encoder
        ("deepseek_v32", "DeepseekV32ForCausalLM: a run of one token: TypeError: "),
        ("llama4_text", "Llama4ForCausalLM: chunked_attention; full_attention and sliding_attenti"),
        ("qwen2_moe", "Qwen2MoeForCausalLM: a window that only its mask has; sliding_window for"),
    ],
)
def test_a_model_that_would_be_served_wrongly(family, line, example, capsys, tmp_path):
    model_like(family).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as info:
        example.main([*SMALL, "--model", str(tmp_path)])
    assert str(info.value.code).startswith(f"--model: {line}")
    assert "\n" not in str(info.value.code)


@pytest.mark.parametrize("family", ["electra", "deepseek_v32"])  # of which one's run raises
def test_a_refused_model_leaves_others_as_they_are(family, example):
    sizes = {"pages": 10, "page_size": 4, "max_pages": 9, "max_batch": 1}
    paged = example.PagedModel(model_of(DECODERS["llama"], "eager"), **sizes)
    request = example.Request(torch.randint(3, VOCABULARY, (11,)).tolist(), 12)

    def tokens():
        server = example.Server(paged, max_batch=1, max_tokens=16, chunk=8, share=True)
        (done,) = example.serve(server, [request], show=False)
        return done.tokens

    before, refused = tokens(), model_like(family)
    refused.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=type(refused).__name__):
        example.PagedModel(refused, **sizes)
    assert refused.config._attn_implementation == "eager"
    assert tokens() == before


def test_prompts_of_a_file(example, capsys, folder):
    words = {f"w{n}": n for n in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    file = folder / "prompts.txt"
    file.write_text("w5 w6 w7\n\nw9\n")
    options = ["--model", str(folder), "--device", "cpu", "--dtype", "float32"]
    example.main([*options, "--prompts", str(file), "--max-new-tokens", "4"])
    texts = [x for x in capsys.readouterr().out.splitlines() if x.startswith("w")]
    for text in texts:
        numbers = [words[word] for word in text.split()]
        prompt = torch.tensor([numbers[:-4]])
        alone = greedy(DECODERS["llama"], "eager", input_ids=prompt, max_new_tokens=4)
        assert numbers == alone[0].tolist()
    assert sorted(x.split()[0] for x in texts) == ["w5", "w9"]


@pytest.mark.parametrize(
    "options, line",
    [
        (["--max-tokens", "40"], "--max-tokens is less"),
        (["--page-size", "24"], "--chunk is no multiple"),
        (["--prompts", "file"], "--prompts needs --model"),
        (["--prompts", "file", "--model", "x"], "--prompts: file is no file"),
        (["--pages", "3"], "--pages: 3; more than "),
        (["--rate", "0"], "--rate is not above 0"),
        (["--rate", "nan"], "--rate is not above 0"),
        (["--requests", "x"], "--requests: invalid positive_int value: 'x'"),
        (["--page-size", "0"], "--page-size: 0; 1 or more"),
        (["--max-new-tokens", "0"], "--max-new-tokens: 0; 1 or more"),
        (["--max-new-tokens", "4"], "--max-new-tokens is for --prompts"),
        (["--prompts", __file__, "--model", "x", "--rate", "1"], "--requests and --rate are of"),
        (["--model", "/no/model"], "--model: /no/model: "),
    ],
)
def test_options_that_cannot_be(options, line, example, capsys):
    with pytest.raises(SystemExit) as info:
        example.main(options)
    assert line in capsys.readouterr().err + str(info.value.code)


def test_all_pages_come_back(example):
    pages, prompt = example.Pages(10, 4, 8), list(range(17))
    first, ready = pages.take(prompt, 20)
    assert (len(first), ready, example.NOBODYS in first) == (5, 0, False)
    pages.share(prompt, first)
    second, ready = pages.take([*prompt[:16], 99], 20)
    assert (second[:4], ready) == (first[:4], 16)
    third, ready = pages.take(prompt[:16], 20)
    assert (third[:2], ready) == (first[:2], 8)  # not the last chunk, whose logits are wanted
    assert pages.take([1], 4) is None
    for held in (second, first, third):
        pages.give_back(held)
    assert sorted(pages.free) == list(range(1, 10)) and not pages.begun
