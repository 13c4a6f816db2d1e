"""flashsdk.integrations.flash_attn: what ``import flash_attn`` finds, and that it is right."""

import importlib
import importlib.metadata
import inspect
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import flashsdk as fs
import pytest

torch = pytest.importorskip("torch")

from flashsdk.integrations import flash_attn as door  # noqa: E402

ROOT = Path(__file__).parents[2]

if door._real():
    pytest.skip("flash-attn itself is installed", allow_module_level=True)


@pytest.fixture(autouse=True)
def installed():
    yield door.install()
    door.uninstall()


# ---- the module


def test_names_and_arguments():
    """Of flash-attn 2.8.3; those of the other functions are in test_torch_flash_attn.py."""
    import flash_attn
    import flash_attn.flash_attn_interface as interface
    from flash_attn import bert_padding
    from flash_attn.layers import rotary

    assert flash_attn.__version__ == "2.8.3"
    packings = ("", "_qkvpacked", "_kvpacked", "_varlen", "_varlen_qkvpacked", "_varlen_kvpacked")
    for packing in packings:
        name = f"flash_attn{packing}_func"
        assert getattr(flash_attn, name) is getattr(interface, name) is getattr(fs.torch, name)
    expected = {
        interface.flash_attn_with_kvcache: "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
        "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
        "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False, "
        "*, k_descale=None, v_descale=None",  # the last two of flash-attn 3
        bert_padding.unpad_input: "hidden_states, attention_mask, unused_mask=None",
        bert_padding.pad_input: "hidden_states, indices, batch, seqlen",
        rotary.apply_rotary_emb: "x, cos, sin, interleaved=False, inplace=False, "
        "seqlen_offsets=0, cu_seqlens=None, max_seqlen=None",
        rotary.apply_rotary_emb_qkv_: "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, "
        "seqlen_offsets=0, num_heads_q=None",
        rotary.apply_rotary_emb_kv_: "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        rotary.RotaryEmbedding: "dim, base=10000.0, interleaved=False, scale_base=None, "
        "device=None",
        rotary.RotaryEmbedding.forward: "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, "
        "num_heads_q=None",
    }
    for function, arguments in expected.items():
        given = inspect.signature(function).parameters.values()
        plain = [p.replace(annotation=p.empty) for p in given]
        assert str(inspect.Signature(plain)) == f"({arguments})"


def test_what_does_not_exist_yet():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn.ops.triton")


def test_metadata():
    for name in ("flash_attn", "flash-attn", "Flash-Attn"):
        assert importlib.metadata.version(name) == "2.8.3"
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    assert importlib.util.find_spec("flash_attn") is not None
    assert importlib.metadata.version("numpy")


def test_it_goes_as_it_came():
    from flash_attn.bert_padding import pad_input

    assert door.install() is sys.modules["flash_attn"]  # again: nothing happens
    door.uninstall()
    door.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]
    assert door._finder not in sys.meta_path
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    assert pad_input(torch.ones(1, 2), torch.tensor([1]), 1, 2).tolist() == [[[0, 0], [1, 1]]]


def test_beside_the_real_one(tmp_path, monkeypatch):
    """One whose import is another package's: refused, then replaced for a while."""
    door.uninstall()
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    for loaded in (False, True):
        if loaded:
            importlib.import_module("flash_attn")
        with pytest.raises(
            fs.Error, match=r"^flash_attn: a module flash_attn \(.*\.py\) is installed; "
        ):
            door.install()
    metadata = tmp_path / "flash_attn-2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.0\n")
    with pytest.raises(fs.Error, match=r"^flash_attn: flash-attn 2\.0 is installed; "):
        door.install()
    real = sys.modules["flash_attn"]
    assert door.install(force=True).__version__ == "2.8.3"
    assert importlib.metadata.version("flash_attn") == "2.8.3"
    door.uninstall()
    assert sys.modules["flash_attn"] is real
    assert importlib.metadata.version("flash_attn") == "2.0"
    del sys.modules["flash_attn"]


def test_transformers_finds_it():
    """Its check for a GPU is answered for it: without one it takes no flash-attn at all."""
    pytest.importorskip("transformers")
    program = """
        from flashsdk.integrations import flash_attn
        flash_attn.install()
        from transformers.utils import import_utils
        import_utils.is_torch_cuda_available = lambda: True
        assert import_utils.is_flash_attn_2_available()
        assert import_utils.is_flash_attn_greater_or_equal("2.8.0")
        assert not import_utils.is_flash_attn_greater_or_equal("2.9.0")
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_doors_import_nothing_by_themselves():
    program = """
        import sys
        import flashsdk.integrations
        assert not {"torch", "transformers", "jax"} & set(sys.modules)
        import flashsdk.integrations.flash_attn
        assert not {"torch", "transformers", "flash_attn"} & set(sys.modules)
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- padding


def test_unpadding():
    from flash_attn.bert_padding import pad_input, unpad_input

    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    for given in (mask, mask.bool()):
        rows, indices, cu_seqlens, longest, used = unpad_input(x, given)
        assert torch.equal(rows, x[mask.bool()])
        assert indices.tolist() == [0, 1, 6, 7, 8, 9]
        assert cu_seqlens.tolist() == [0, 2, 6, 6] and cu_seqlens.dtype == torch.int32
        assert longest == 4 and type(longest) is int and used.tolist() == [2, 4, 0]
    padded = pad_input(rows, indices, 3, 5)
    assert torch.equal(padded, x * mask[..., None, None])
    weights = torch.randn(3, 5, 2, 4)
    (gradient,) = torch.autograd.grad((padded * weights).sum(), x)
    assert torch.equal(gradient, weights * mask[..., None, None])

    unused = torch.zeros_like(mask)
    unused[2, :2] = 1
    rows, indices, cu_seqlens, longest, used = unpad_input(x, mask, unused)
    assert torch.equal(rows, x[(mask + unused).bool()]) and used.tolist() == [2, 4, 0]
    assert cu_seqlens.tolist() == [0, 2, 6, 8] and longest == 4

    for wrong in (mask[:, :4], mask[:, None, None]):  # keys of attention, not a mask of tokens
        with pytest.raises(fs.Error, match=r"^attention_mask: .*; \(batch, seqlen\) \(3, 5\)"):
            unpad_input(x, wrong)
        with pytest.raises(fs.Error, match=r"^unused_mask: shape "):
            unpad_input(x, mask, wrong)


def test_unpadding_of_several_sequences_in_a_row():
    from flash_attn.bert_padding import unpad_input_for_concatenated_sequences

    x = torch.randn(2, 6, 3)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat((x[0, :5], x[1])))
    assert indices.tolist() == [*range(5), *range(6, 12)]
    assert cu_seqlens.tolist() == [0, 2, 5, 11] and longest == 6


def test_indexing():
    from flash_attn.bert_padding import (
        index_first_axis,
        index_first_axis_residual,
        index_put_first_axis,
    )

    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 3])
    assert torch.equal(index_first_axis(x, indices), x[indices])
    put = index_put_first_axis(x[:3], indices, 6)
    assert torch.equal(put[indices], x[:3]) and put[[1, 2, 5]].count_nonzero() == 0
    torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), x)
    torch.autograd.gradcheck(lambda x: index_put_first_axis(x[:3], indices, 6), x)
    torch.autograd.gradcheck(lambda x: index_first_axis_residual(x, indices), x)


def test_somebody_elses_code():
    """Padded attention as models write it, beside PyTorch's."""
    from flash_attn import flash_attn_varlen_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

    q, k, v = (torch.randn(2, 20, 4, 16, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, 13:] = False
    rows, indices, cu_seqlens, longest, *_ = unpad_input(q, mask)
    others = (index_first_axis(x.flatten(0, 1), indices) for x in (k, v))
    out = flash_attn_varlen_func(
        rows, *others, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest,
        max_seqlen_k=longest, dropout_p=0.0, softmax_scale=None, causal=True,
    )  # fmt: skip
    out = pad_input(out, indices, 2, 20)
    visible = mask[:, None, None] & torch.ones(20, 20, dtype=torch.bool).tril()
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible
    ).transpose(1, 2)
    torch.testing.assert_close(out[mask], want[mask])
    weights = torch.randn(out[mask].shape)
    gradients = (torch.autograd.grad((x[mask] * weights).sum(), (q, k, v)) for x in (out, want))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


# ---- rotary


def turned(x, angles, interleaved):
    """The definition: pairs as complex numbers, times e^(i·angle). angles broadcast with x."""
    x, half = x.double(), angles.shape[-1]
    part, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    pairs = torch.stack((z.real, z.imag), -1 if interleaved else -2)
    return torch.cat((pairs.flatten(-2), rest), -1)


def tables(positions=30, half=3):
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float64), torch.tensor([1.0, 0.3, 0.01])[:half].double()
    )
    return angles, angles.cos().float(), angles.sin().float()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", ["none", "one", "many"])
def test_rotary(offsets, interleaved, inplace):
    from flash_attn.layers.rotary import apply_rotary_emb

    angles, cos, sin = tables()
    x = torch.randn(2, 10, 3, 8, requires_grad=True)
    begin = {"none": 0, "one": 4, "many": torch.tensor([3, 20])}[offsets]
    places = torch.arange(10) + (begin[:, None] if offsets == "many" else begin)
    want = turned(x, angles[places].unsqueeze(-2), interleaved)
    given = x * 1 if inplace else x
    out = apply_rotary_emb(given, cos, sin, interleaved, inplace, seqlen_offsets=begin)
    assert (out is given) == inplace
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-5)
    weights = torch.randn(want.shape)
    for a, b in zip(
        torch.autograd.grad((out * weights).sum(), x),
        torch.autograd.grad((want * weights).sum(), x),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_rotary_of_packed_sequences():
    from flash_attn.layers.rotary import apply_rotary_emb

    angles, cos, sin = tables()
    x = torch.randn(12, 3, 8)
    cu_seqlens = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    for begin in (0, 2, torch.tensor([3, 0, 7])):
        first = [begin] * 3 if isinstance(begin, int) else begin.tolist()
        places = torch.tensor([*range(first[0], first[0] + 5), *range(first[2], first[2] + 7)])
        want = turned(x, angles[places].unsqueeze(-2), False)
        out = apply_rotary_emb(x, cos, sin, seqlen_offsets=begin, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-5)


def test_rotary_behind_the_tables():
    """Rows behind the last position stay as they are, as in flash-attn's kernel."""
    from flash_attn.layers.rotary import apply_rotary_emb

    _, cos, sin = tables(6)
    x = torch.randn(1, 10, 3, 8)
    out = apply_rotary_emb(x, cos, sin)
    assert torch.equal(out[:, 6:], x[:, 6:]) and not torch.equal(out[:, 1:6], x[:, 1:6])


@pytest.mark.parametrize("grouped", [False, True])
def test_rotary_of_qkv(grouped):
    from flash_attn.layers.rotary import apply_rotary_emb_kv_, apply_rotary_emb_qkv_

    angles, cos, sin = tables()
    here = angles[:10].unsqueeze(-2)
    x = torch.randn(2, 10, 4, 8)
    q, k, v = torch.randn(2, 10, 4, 8), torch.randn(2, 10, 2, 8), torch.randn(2, 10, 2, 8)
    if grouped:
        qkv = torch.cat((q, k, v), 2)
        out = apply_rotary_emb_qkv_(qkv, cos, sin, num_heads_q=4)
        q_out, k_out, v_out = out.split((4, 2, 2), 2)
    else:
        q = q[:, :, :2]
        qkv = torch.stack((q, k, v), 2)
        out = apply_rotary_emb_qkv_(qkv, cos, sin, cos.flip(0), sin.flip(0))
        q_out, k_out, v_out = out.unbind(2)
    assert out is qkv and torch.equal(v_out, v)
    torch.testing.assert_close(q_out.double(), turned(q, here, False), atol=1e-6, rtol=1e-5)
    where = here if grouped else angles.flip(0)[:10].unsqueeze(-2)
    torch.testing.assert_close(k_out.double(), turned(k, where, False), atol=1e-6, rtol=1e-5)
    kv = torch.stack((k, v), 2)
    assert apply_rotary_emb_kv_(kv, cos, sin) is kv
    torch.testing.assert_close(kv[:, :, 0].double(), turned(k, here, False), atol=1e-6, rtol=1e-5)
    assert torch.equal(kv[:, :, 1], v) and x.shape == (2, 10, 4, 8)


@pytest.mark.parametrize("scale_base", [None, 512])
def test_rotary_embedding(scale_base):
    """Its rotations depend on the distance alone; with XPos scores shrink with it."""
    from flash_attn.layers.rotary import RotaryEmbedding

    rotary = RotaryEmbedding(8, base=100.0, scale_base=scale_base)
    vectors = torch.randn(2, 8, requires_grad=True)
    qkv = torch.stack((vectors[0], vectors[1], vectors[1]))[None, None, :, None]
    qkv = qkv.expand(1, 12, 3, 1, 8).contiguous()
    q, k, v = rotary(qkv)[0, :, :, 0].unbind(1)
    assert torch.equal(v[3], vectors[1])
    scores = q @ k.T
    for distance in (0, 1, 5):
        along = scores.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    frequencies = 100.0 ** (-torch.arange(0, 8, 2) / 8)
    a, b = (torch.complex(x[:4], x[4:]) for x in vectors)
    turn = torch.polar(torch.ones(4), 5 * frequencies)
    decay = 1.0
    if scale_base:
        decay = ((torch.arange(0, 8, 2) + 3.2) / 11.2) ** (5 / 512)
    want = (a * turn * b.conj() * decay).sum().real
    torch.testing.assert_close(scores[5, 0], want)
    assert torch.autograd.grad(scores.sum(), vectors)[0].isfinite().all()

    q, kv = rotary(qkv[:, :, 0].detach().clone(), qkv[:, :, 1:].detach().clone(), 3)
    assert q.shape == (1, 12, 1, 8) and kv.shape == (1, 12, 2, 1, 8)
    half = RotaryEmbedding(8, base=100.0, scale_base=scale_base).to(torch.bfloat16)
    out = half(qkv.detach().bfloat16())
    exact = rotary(qkv.detach().bfloat16().float())
    torch.testing.assert_close(out.float(), exact, atol=0.05, rtol=0.02)


def test_rotary_refuses_what_cannot_be():
    from flash_attn.layers import rotary

    _, cos, sin = tables()
    x = torch.randn(2, 10, 3, 8)
    qkv, cu = x[:, :, :, None], torch.tensor([0, 4, 10])

    def at(offsets, cu_seqlens=None):
        rows = x if cu_seqlens is None else x[0]
        rotary.apply_rotary_emb(
            rows, cos, sin, seqlen_offsets=offsets, cu_seqlens=cu_seqlens, inplace=True
        )

    for match, call in (
        (r"^x: shape", lambda: rotary.apply_rotary_emb(x[0], cos, sin)),
        (r"^cos: shape .*, sin's ", lambda: rotary.apply_rotary_emb(x[..., :4], cos, sin)),
        (r"^qkv: shape .*, num_heads_q None; ", lambda: rotary.apply_rotary_emb_qkv_(x, cos, sin)),
        (r"^kv: shape", lambda: rotary.apply_rotary_emb_kv_(x, cos, sin)),
        (
            r"^max_seqlen: None with a tensor",
            lambda: rotary.RotaryEmbedding(4)(x[:, :, None], None, torch.zeros(2)),
        ),
        (r"^seqlen_offsets: -1; 0 or more", lambda: at(-1)),
        (r"^seqlen_offsets: -2 at \[1\]; 0 or more", lambda: at(torch.tensor([3, -2]))),
        (r"^seqlen_offsets: -2 at \[1\]", lambda: at(torch.tensor([0, -2]), cu_seqlens=cu)),
        (r"^seqlen_offset: -40; 0", lambda: rotary.RotaryEmbedding(4)(qkv, seqlen_offset=-40)),
    ):
        with pytest.raises(fs.Error, match=match):
            call()
    assert math.isclose(rotary.RotaryEmbedding(4, base=16).inv_freq[1], 0.25)


# ---- the page


def test_the_page():
    page = ROOT / "docs" / "flash_attn.md"
    if not page.exists():
        pytest.skip("not a checkout")
    examples = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert examples
    door.uninstall()
    names: dict[str, object] = {}
    for example in examples:
        exec(example, names)
