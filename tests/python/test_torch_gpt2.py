"""Gradients of a whole GPT-2 with exact attention in 16 bits, beside standard attention in float32.

Everything but attention is float32, in all models, so that the gradients differ by what attention
rounds alone. That is bounded by measuring: for every parameter the distance to the gradient in
float32 may be twice that of standard attention in the same 16 bits, plus 1e-5 of the gradient for
the sums in float32: the rule of docs/numerics.md, of norms. Standard attention rounds S and P as
well, so that exact attention is nearer in general.
"""

from dataclasses import dataclass

import flashsdk as fs
import pytest
from runner import targets

torch = pytest.importorskip("torch")

from flashsdk.torch import attention  # noqa: E402
from standard_attention import standard  # noqa: E402
from torch import nn  # noqa: E402

VOCABULARY = 1024


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    seqlen: int
    batch: int

    @property
    def width(self) -> int:
        return 64 * self.heads


GPT2 = Size(layers=12, heads=12, seqlen=1024, batch=2)
SMALL = Size(layers=12, heads=2, seqlen=80, batch=2)  # for CPUs


def causal(q, k, v):
    """Standard attention of tensors (batch, seqlen, heads, head_dim)."""
    seqlen = q.shape[1]
    visible = torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device).tril()
    return standard(q, k, v, visible=visible)[0]


class Layer(nn.Module):
    def __init__(self, size):
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # One parameter, as in GPT-2: the gradient of k's bias is 0 by itself, and all of it error.
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, attend):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attend(*qkv).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt2(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.seqlen, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith((".out.weight", ".down.weight"))
                # Twice GPT-2's: logits of attention are then of the order of 1.
                nn.init.normal_(p, std=0.04 / (2 * size.layers) ** 0.5 if last else 0.04)

    def forward(self, tokens, attend):
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x, attend)
        return self.norm(x) @ self.tokens.weight.T


def gradients(model, tokens, attend):
    logits = model(tokens[:, :-1], attend).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    return torch.autograd.grad(loss, list(model.parameters()))


def in_16_bits(attend, dtype):
    return lambda *x: attend(*(t.to(dtype) for t in x)).float()


def ours(backend):
    return lambda q, k, v: attention(q, k, v, mask=fs.Causal(), backend=backend)


def distances(size, device, dtype, attend):
    """By parameter: how far ours and standard attention are from float32, and what is allowed."""
    torch.manual_seed(0)
    model = Gpt2(size).to(device)
    tokens = torch.randint(VOCABULARY, (size.batch, size.seqlen + 1), device=device)
    exact = gradients(model, tokens, causal)
    both = [gradients(model, tokens, in_16_bits(f, dtype)) for f in (attend, causal)]
    found = {}
    for (name, _), want, mine, theirs in zip(model.named_parameters(), exact, *both):
        error, yardstick = ((x - want).norm().item() for x in (mine, theirs))
        found[name] = error, 2 * yardstick + 1e-5 * want.norm().item()
    return found


# Of the CPU one instruction set, which calls take when nothing else is asked for.
@pytest.mark.parametrize("target", {t.backend: t for t in targets()}.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_all_parameters(target, dtype):
    if target.missing:
        pytest.skip(target.missing)
    on_cpu = target.backend == "cpu"
    name = str(dtype).removeprefix("torch.")
    if not any(
        k["backend"] == target.backend and k["dtype"] == name and k["head_dim"] >= 64
        for k in fs.kernels()
    ):
        pytest.skip("dtype or head_dim is not in this build")
    size, device = (SMALL, "cpu") if on_cpu else (GPT2, "cuda")
    found = distances(size, device, dtype, ours(target.backend))
    assert len(found) == 4 + 12 * size.layers
    bad = {name: pair for name, pair in found.items() if not pair[0] <= pair[1]}
    assert not bad, bad


def test_other_attention_is_found_out():
    """The bound is no formality: one that forgets the mask, or has a scale a little off."""
    size, dtype = Size(layers=3, heads=1, seqlen=64, batch=1), torch.float16
    backend = "cpu"
    for wrong in (
        lambda q, k, v: attention(q, k, v, backend=backend),
        lambda q, k, v: attention(q * 1.02, k, v, mask=fs.Causal(), backend=backend),
    ):
        found = distances(size, "cpu", dtype, wrong)
        assert any(error > allowed for error, allowed in found.values())
