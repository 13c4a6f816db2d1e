"""Trains a small GPT in Flax (nnx), on a CPU in a minute, with flashsdk's attention under nnx.jit.

    python examples/train_flax.py             # trains for a minute; --record FILE keeps what it did
    python examples/train_flax.py --smoke     # seconds: the same with JAX's own attention beside it

The text is the source of Python's standard library, which every machine has, one character at a
time. ``--smoke`` trains from the same weights with ``jax.nn.dot_product_attention``, and fails if
the losses differ by more than TOLERANCE. Needs flax (``pip install flax``).
"""

from __future__ import annotations

import argparse
import json
import string
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flashsdk as fs
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flashsdk.jax import attention
from flax import nnx

TOLERANCE = 1e-3  # nats, between the two losses of any step
LAST = 10  # steps whose mean loss is the last
ALPHABET = {c: i for i, c in enumerate(sorted(string.printable), start=1)}  # 0 is any other


@dataclass(frozen=True)
class Config:
    context: int = 256
    batch: int = 8
    layers: int = 3
    heads: int = 4
    heads_kv: int = 2  # grouped queries
    dim: int = 128
    dropout: float = 0.0
    learning_rate: float = 3e-3


SMOKE = Config(context=64, batch=2, layers=1, dim=64)


class Attention(nnx.Module):
    """Causal self-attention of x (batch, seqlen, dim), in any model of nnx."""

    def __init__(self, config: Config, attend: Callable[..., jax.Array], rngs: nnx.Rngs):
        self.heads = (config.heads, config.heads_kv, config.heads_kv)
        self.head_dim = config.dim // config.heads
        self.qkv = nnx.Linear(config.dim, sum(self.heads) * self.head_dim, rngs=rngs)
        self.out = nnx.Linear(config.dim, config.dim, rngs=rngs)
        self.attend, self.dropout, self.rngs = attend, config.dropout, rngs

    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        rows = self.qkv(x).reshape(*x.shape[:2], sum(self.heads), self.head_dim)
        q, k, v = jnp.split(rows, np.cumsum(self.heads[:-1]), axis=2)
        options: dict[str, Any] = {}
        if train and self.dropout:  # another key each step, from the stream that Flax has for it
            options = {"dropout_p": self.dropout, "dropout_key": self.rngs.dropout()}
        return self.out(self.attend(q, k, v, **options).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, config: Config, attend: Callable[..., jax.Array], rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(config.dim, rngs=rngs) for _ in range(2)])
        self.attention = Attention(config, attend, rngs)
        self.up = nnx.Linear(config.dim, 4 * config.dim, rngs=rngs)
        self.down = nnx.Linear(4 * config.dim, config.dim, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = x + self.attention(self.norms[0](x), train)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, config: Config, attend: Callable[..., jax.Array], rngs: nnx.Rngs):
        self.characters = nnx.Embed(len(ALPHABET) + 1, config.dim, rngs=rngs)
        self.places = nnx.Embed(config.context, config.dim, rngs=rngs)
        self.blocks = nnx.List([Block(config, attend, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.dim, rngs=rngs)

    def __call__(self, text: jax.Array, train: bool = True) -> jax.Array:
        x = self.characters(text) + self.places(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x, train)
        return self.characters.attend(self.norm(x))


def ours(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    return attention(q, k, v, mask=fs.Causal(), **options)


def standard(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@nnx.jit
def step(model: GPT, optimizer: nnx.Optimizer, text: jax.Array) -> jax.Array:
    def loss_of(model: GPT) -> jax.Array:
        logits = model(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def load_text() -> np.ndarray:
    """All characters as numbers, int32 (characters,)."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text("utf-8", errors="replace") for path in files)
    return np.array([ALPHABET.get(c, 0) for c in text], np.int32)


def train(
    config: Config, attend: Callable[..., jax.Array], seconds: float, steps: int | None = None
) -> list[float]:
    """The loss of each step, in nats a character."""
    begin = time.perf_counter()
    text, losses = load_text(), []
    model = GPT(config, attend, nnx.Rngs(0, dropout=1))
    optimizer = nnx.Optimizer(model, optax.adamw(config.learning_rate), wrt=nnx.Param)
    while len(losses) != steps and time.perf_counter() - begin < seconds:
        rng = np.random.default_rng(len(losses))
        first = rng.integers(len(text) - config.context, size=(config.batch, 1))
        losses.append(float(step(model, optimizer, text[first + np.arange(config.context + 1)])))
        if steps is None and len(losses) % 25 == 1:
            print(
                f"step {len(losses):4}  loss {losses[-1]:.3f}  {time.perf_counter() - begin:.0f} s"
            )
    return losses


def write_record(path: Path, losses: list[float], seconds: float) -> None:
    """What docs/jax.md says of a run, by benchmarks/render.py of the sources."""
    from flashsdk._commands import machine

    done = {"steps": len(losses), "seconds": seconds}
    done |= {"first_loss": losses[0], "last_loss": float(np.mean(losses[-LAST:]))}
    header = machine.record_header("train_flax", ("numpy", "jax", "flax"))
    path.write_text(json.dumps({**header, **done}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="how long to train")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps of a tiny model, compared"
    )
    parser.add_argument("--record", type=Path, help="where to write how far it came, as JSON")
    parser.add_argument("--dropout", type=float, default=0.0, help="of attention's probabilities")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if arguments.smoke:
        losses = [train(SMOKE, attend, 600, steps=8) for attend in (ours, standard)]
        apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
        print(f"losses {losses[0][0]:.4f} to {losses[0][-1]:.4f}, at most {apart:.1e} apart")
        if apart > TOLERANCE or not losses[0][-1] < losses[0][0]:
            raise SystemExit("the two trainings differ, or do not learn")
        dropped = train(Config(**{**vars(SMOKE), "dropout": 0.2}), ours, 600, steps=3)
        print(f"with dropout {dropped[-1]:.4f}; {time.perf_counter() - begin:.1f} s")
        return
    losses = train(Config(dropout=arguments.dropout), ours, arguments.seconds)
    seconds = time.perf_counter() - begin  # with what JAX took to compile
    last = np.mean(losses[-LAST:])
    print(f"{len(losses)} steps in {seconds:.1f} s, loss {losses[0]:.3f} to {last:.3f}")
    if arguments.record:
        write_record(arguments.record, losses, seconds)


if __name__ == "__main__":
    main()
