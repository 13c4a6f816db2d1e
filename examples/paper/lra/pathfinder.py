"""Path-X and Path-256: a Transformer that reads images of 16384 and 65536 pixels.

The claim (FlashAttention, arXiv 2205.14135, table 6): the first Transformer above chance on Path-X
(61.4 %), and with block-sparse attention on Path-256 (63.1 %). As there, the model is pretrained on
smaller images and goes on to larger ones:

    cd examples/paper/lra
    python pathfinder.py --size 32  --out p32  --minutes 9            # again, to go on
    python pathfinder.py --size 64  --out p64  --minutes 9 --start p32/checkpoint.pt
    python pathfinder.py --size 128 --out p128 --minutes 9 --start p64/checkpoint.pt    # Path-X
    python pathfinder.py --size 256 --out p256 --minutes 9 --start p128/checkpoint.pt   # Path-256
    python pathfinder.py --smoke                                      # a check: seconds on a CPU

A command that is run again goes on from exactly the saved state, and adds its part to
``record.json``: the curve, and the accuracy on ``--test`` held-out images with its 95 % interval.
``--cooldown IMAGES`` lets the learning rate fall to 0 over so many images, and ends the training.

- A pixel is a token. 6 layers of width 128 with 4 heads of 64: 1.2 million parameters. Positions
  are rotary, for rows and columns, in units of the contours' pitch, so that all sizes share them.
  Half of the heads begin by looking at a place nearby. The label is read from a weighted mean.
- Dense attention to 128, block-sparse at 256: pixels are ordered in tiles of 8 × 16, which are the
  blocks, and a tile sees those around it and a butterfly of the far ones.
- Training images are drawn without end (pathfinder_data.py). They become harder: contours of 4
  paddles and no distractor first. Above ``--pass`` accuracy on a pool of fresh images, or above
  75 % after 24 pools, comes the next stage; the last one is the benchmark's.
- Training sees labels alone. ``--teach 1`` adds a loss for each pixel: how many dots its contour
  carries. The test images are of the same generator: the benchmark's files are not used.
"""

from __future__ import annotations

import math
import sys
from argparse import BooleanOptionalAction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import flashsdk as fs
import torch
import torch.nn.functional as F
from common import Clock, Record, Row, Training
from flashsdk.torch import attention
from pathfinder_data import TASKS, Images, Task, generate
from torch import Tensor, nn

HEAD_DIM = 64
TILE = (8, 16)  # pixels: one block of 128 tokens
TEST_SEED = 1 << 62  # no pool of training images comes near
GOALS = {128: 0.614, 256: 0.631}  # the paper's

PATIENCE = 24  # pools of a stage, after which less accuracy passes

# By size: images a step, images a pool, learning rate.
BATCH = {16: 64, 24: 64, 32: 256, 64: 64, 128: 32, 256: 8}
POOL = {16: 2048, 24: 2048, 32: 16384, 64: 4096, 128: 1024, 256: 512}
RATE = {16: 1e-3, 24: 1e-3, 32: 1e-3, 64: 5e-4, 128: 3e-4, 256: 2e-4}


# ---- the order of the pixels, their positions, and which blocks see each other


def tiled(size: int) -> Tensor:
    """Row-major index of the pixel that each token is, int64 (size²,): tile after tile.

    The order means nothing to attention. It makes a block of 128 tokens a piece of the image.
    """
    index = torch.arange(size * size).view(size, size)
    tall, wide = math.gcd(TILE[0], size), math.gcd(TILE[1], size)
    return index.view(size // tall, tall, size // wide, wide).transpose(1, 2).flatten()


def rotation(task: Task) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles by which q and k are turned, float32 (size², HEAD_DIM / 2)."""
    index = tiled(task.size)
    place = torch.stack([index // task.size, index % task.size], -1) / task.pitch
    # Radians a pitch. A pixel of the smallest images is a quarter of one: 1.1 down to 0.04 a pixel.
    frequency = torch.logspace(math.log10(4.5), math.log10(0.15), HEAD_DIM // 4)
    angle = (place[:, :, None] * frequency).flatten(1)
    return angle.cos(), angle.sin()


def near_and_butterfly(size: int, radius: int = 40) -> fs.BlockMask:
    """Tiles whose centres are within ``radius`` pixels in both directions, and a butterfly."""
    rows, columns = size // TILE[0], size // TILE[1]
    tile = torch.arange(rows * columns)
    y, x = tile // columns * TILE[0], tile % columns * TILE[1]
    near = ((y[:, None] - y).abs() <= radius) & ((x[:, None] - x).abs() <= radius)
    flipped = tile[:, None] ^ tile
    return fs.BlockMask.from_dense(
        (near | (flipped & (flipped - 1) == 0)).numpy(),
        TILE[0] * TILE[1],
        seqlen_q=size * size,
        seqlen_k=size * size,
    )


# ---- model


class Block(nn.Module):
    """Pre-norm Transformer layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * heads * HEAD_DIM)
        self.project = nn.Linear(heads * HEAD_DIM, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        # Half of the heads start by looking at a place near the pixel, each at one of its own: with
        # biases of q and k that are an offset apart. From there they learn lines sooner.
        with torch.no_grad():
            frequency = torch.logspace(math.log10(4.5), math.log10(0.15), HEAD_DIM // 4)
            bias = torch.zeros(3, heads, HEAD_DIM)
            for head in range(heads // 2):
                offset = torch.randn(2) * 0.7  # pitches
                angle = (offset[:, None] * frequency).flatten()
                bias[0, head, : HEAD_DIM // 2] = 1.4
                bias[1, head] = 1.4 * torch.cat([angle.cos(), -angle.sin()])
            self.qkv.bias.copy_(bias.flatten())

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: fs.BlockMask | None) -> Tensor:
        """(batch, tokens, width); cos and sin (tokens, 1, HEAD_DIM / 2)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, HEAD_DIM)).unbind(2)
        out = attention(turn(q, cos, sin), turn(k, cos, sin), v, mask=mask)
        x = x + self.project(out.flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864): pairs are element i and i + HEAD_DIM / 2."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).to(x.dtype)


class Transformer(nn.Module):
    def __init__(self, width: int, heads: int, layers: int):
        super().__init__()
        self.pixel = nn.Sequential(nn.Linear(1, width), nn.GELU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.dots = nn.Linear(width, 3)
        self.weight = nn.Linear(width, heads)  # of a pixel in the mean, for each part of the width
        self.label = nn.Linear(width, 1)

    def forward(
        self, pixels: Tensor, cos: Tensor, sin: Tensor, mask: fs.BlockMask | None
    ) -> tuple[Tensor, Tensor]:
        """uint8 (batch, tokens) to logits (batch,) of the label and (batch, tokens, 3) of dots."""
        x = self.pixel(pixels[..., None].float() / 255)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = self.norm(x)
        weight = self.weight(x).float().softmax(1)
        parts = x.float().unflatten(2, (weight.shape[2], -1))
        pooled = (weight[..., None] * parts).sum(1).flatten(1)
        return self.label(pooled)[:, 0].float(), self.dots(x)


# ---- training


def stages(task: Task) -> list[Task]:
    """From short contours without distractors to the benchmark's."""
    steps = max(1, (task.paddles - 4 + 1) // 2)
    first = task.paddles - 2 * steps
    return [
        task.easier(first + 2 * i, round(task.distractors * i / steps)) for i in range(steps + 1)
    ]


class Run:
    """All that a step needs and that a checkpoint does not hold."""

    def __init__(self, options, task: Task):
        self.options, self.task, self.device = options, task, options.device
        self.order = tiled(task.size).to(self.device)
        self.cos, self.sin = (t[:, None].to(self.device) for t in rotation(task))
        self.mask = near_and_butterfly(task.size) if options.sparse else None
        self.pool: Images | None = None
        self.drawn: tuple[int, int] | None = None  # which pool and stage ``pool`` is
        self.right = torch.zeros((), device=self.device)

    def forward(self, model: nn.Module, pixels: Tensor) -> tuple[Tensor, Tensor]:
        tokens = pixels.flatten(1)[:, self.order]
        half = torch.device(self.device).type == "cuda"
        with torch.autocast(self.device, torch.bfloat16, enabled=half):
            return model(tokens, self.cos, self.sin, self.mask)

    def step(self, training: Training, state: Row) -> dict[str, Tensor]:
        options, task = self.options, self.task
        index, place = divmod(state["images"], options.pool)
        if self.drawn != (index, state["stage"]):
            seed = (options.seed << 48) + (task.size << 36) + index
            easier = stages(task)[state["stage"]]
            self.pool = generate(easier, options.pool, seed, self.device)
            self.drawn = (index, state["stage"])
        assert self.pool is not None
        rows = slice(place, place + options.batch)
        labels = self.pool.labels[rows].float()
        logits, dots = self.forward(training.model, self.pool.pixels[rows])
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        total = loss
        if options.teach:
            counts = self.pool.dots[rows].flatten(1)[:, self.order].long().flatten()
            total = total + options.teach * F.cross_entropy(
                dots.float().flatten(0, 1), counts, ignore_index=-1
            )
        training.learning_rate(self.rate(state))
        total.backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        right = ((logits > 0) == (labels > 0.5)).sum()
        self.right += right
        state["images"] += options.batch
        if state["images"] % options.pool == 0:
            self.end_of_pool(state)
        taught = total.detach() - loss.detach()
        accuracy = right / options.batch
        return {"loss": loss.detach(), "taught": taught, "accuracy": accuracy}

    def end_of_pool(self, state: Row) -> None:
        """The pool was new to the model, so that its accuracy is that of unseen images."""
        accuracy = self.right.item() / self.options.pool
        self.right.zero_()
        state["pools"] += 1
        # A stage that stays hard is left as well, once the model is well above chance.
        wanted = (
            self.options.passing if state["pools"] <= PATIENCE else min(0.75, self.options.passing)
        )
        if accuracy >= wanted and state["stage"] < len(stages(self.task)) - 1:
            state["stage"] += 1
            state["pools"] = 0

    def rate(self, state: Row) -> float:
        rate = self.options.rate * min(1.0, (state["step"] + 1) / self.options.warmup)
        if state["cooldown"]:
            done = (state["images"] - state["cooldown_from"]) / state["cooldown"]
            rate *= max(0.0, 1.0 - done)
        return rate


def over(state: Row, most: int) -> bool:
    cooled = state["cooldown"] and state["images"] >= state["cooldown_from"] + state["cooldown"]
    return bool(cooled) or state["images"] >= most


def test(run: Run, model: nn.Module, count: int) -> tuple[int, int]:
    """Held-out images at the benchmark's difficulty: how many are told right, and of how many.

    They are drawn on the CPU, so that they are the same ones whatever the device. The model runs as
    in training, which it can as nothing in it is random: without gradients, or in eval(),
    torch.compile would compile it anew, and that takes longer than the test.
    """
    right = done = 0
    while done < count:
        images = generate(run.task, min(1024, count - done), TEST_SEED + done, "cpu")
        for rows in torch.arange(len(images)).split(run.options.batch):
            logits, _ = run.forward(model, images.pixels[rows].to(run.device))
            right += int(((logits > 0).cpu() == (images.labels[rows] == 1)).sum())
        done += len(images)
        common.progress(done / count, f"test: {right / done:.4f} of {done} images")
    return right, done


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--size", type=int, default=32, choices=TASKS)
    parser.add_argument("--start", type=Path, help="checkpoint of another size to begin with")
    parser.add_argument("--stage", type=int, help="begin with this stage, from 0; -1 is the last")
    parser.add_argument("--pass", dest="passing", type=float, default=0.9, metavar="ACCURACY")
    parser.add_argument("--teach", type=float, default=0.0, help="weight of a loss of the pixels")
    parser.add_argument("--layers", type=common.count, default=6)
    parser.add_argument(
        "--heads", type=common.count, default=4, help="of 64; the width is 32 a head"
    )
    parser.add_argument("--batch", type=common.count, help="images a step")
    parser.add_argument("--pool", type=common.count, help="images that are drawn together")
    parser.add_argument("--rate", type=float, help="learning rate")
    parser.add_argument("--warmup", type=common.count, default=300, help="steps")
    parser.add_argument(
        "--images", type=common.at_least(0), default=10**12, help="train on, at most"
    )
    parser.add_argument("--cooldown", type=common.at_least(0), default=0, metavar="IMAGES")
    parser.add_argument(
        "--test", type=common.at_least(0), default=5120, help="held-out images; 0 is none"
    )
    parser.add_argument("--sparse", action=BooleanOptionalAction, help="block-sparse attention")
    parser.add_argument("--compile", action=BooleanOptionalAction, help="torch.compile of a layer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.smoke:
        options.size, options.layers, options.heads = 16, 2, 2
        options.batch, options.pool, options.images, options.test = 16, 64, 256, 64
    task = TASKS[options.size]
    options.batch = options.batch or BATCH[task.size]
    options.pool = (options.pool or POOL[task.size]) // options.batch * options.batch
    if options.pool == 0:
        parser.error(f"--pool: less than the {options.batch} images of a step")
    options.rate = RATE[task.size] if options.rate is None else options.rate
    if not -len(stages(task)) <= (options.stage or 0) < len(stages(task)):
        parser.error(f"--stage: {options.stage}; below {len(stages(task))}")
    cuda = torch.device(options.device).type == "cuda"
    options.sparse = task.size >= 256 if options.sparse is None else options.sparse
    options.compile = cuda if options.compile is None else options.compile

    clock = Clock(options.minutes)
    out = common.folder(options.out, f"lra/pathfinder{task.size}", options.smoke)
    settings = {
        "size": task.size,
        "layers": options.layers,
        "heads": options.heads,
        "batch": options.batch,
        "pool": options.pool,
        "attention": "block-sparse" if options.sparse else "dense",
        "seed": options.seed,
    }
    record = Record.of(options, out, "lra/pathfinder", settings)

    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    model = Transformer(32 * options.heads, options.heads, options.layers).to(options.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=cuda
    )
    first = 0 if options.stage is None else range(len(stages(task)))[options.stage]
    # teach: the largest so far, of the models that it began with, too.
    state = {"images": 0, "stage": first, "pools": 0, "cooldown": 0, "cooldown_from": 0, "teach": 0}
    run = Run(options, task)
    counters = {"right": run.right}
    training = Training(out / "checkpoint.pt", model, optimizer, state, counters)
    if options.start and not training.resumed:
        found = common.load_weights(options.start, model)
        training.state["teach"] = found["state"].get("teach", 0.0)
        record.result["started_from"] = {
            "images": found["state"]["images"],
            "seconds": found["state"]["seconds"],
        }
    if training.resumed and options.stage is not None:
        training.state["stage"] = first
    if options.cooldown and not training.state["cooldown"]:
        training.state["cooldown"] = options.cooldown
        training.state["cooldown_from"] = training.state["images"]
    training.state["teach"] = max(options.teach, training.state.get("teach", 0.0))
    if options.compile:
        for block in model.blocks:
            block.compile()
    record.data["runs"][-1].update(teach=options.teach, passing=options.passing, rate=options.rate)
    parameters = sum(p.numel() for p in model.parameters())
    doing = "goes on" if training.resumed else "begins"
    print(
        f"{task.size} × {task.size} on {common.device_name(options.device)}: "
        f"{parameters / 1e6:.2f} M parameters, {doing} at {training.state['images']} images"
    )
    last_stage = len(stages(task)) - 1

    def show(state: Row, means: Row) -> str:
        return (
            f"stage {state['stage']}/{last_stage}  {state['images']} images  "
            f"loss {means['loss']:.3f}  accuracy {means['accuracy']:.3f}  "
            f"{state['seconds'] / 60:.1f} min"
        )

    training.run(
        lambda state: run.step(training, state),
        record,
        clock,
        until=lambda state: over(state, options.images),
        show=show,
        share=lambda _: clock.share(),
        # A test takes a third of the time of training on as many images, or less.
        reserve=reserve(options, record),
        device=options.device,
        every=2.0 if options.smoke else 10.0,
    )
    result = record.result
    result.update(
        size=task.size,
        parameters=parameters,
        images=training.state["images"],
        seconds=round(training.state["seconds"], 1),
        stage=training.state["stage"],
        last_stage=last_stage,
        teach=training.state["teach"],
    )
    if options.test:
        right, count = test(run, model, options.test)
        low, high = common.wilson(right, count)
        print(f"\naccuracy {right / count:.4f} ({low:.4f} to {high:.4f}) on {count} new images")
        result.update(accuracy=right / count, low=low, high=high, tested=count)
        result["paper"] = GOALS.get(task.size)
        at = training.state["images"]
        record.row(images=at, accuracy=right / count, low=low, high=high, tested=count)
    record.save()
    curve = record.data["curve"]
    common.plot(
        out / "curve.png",
        {
            "new training images, of the stage": (
                [point["images"] for point in curve],
                [point["accuracy"] for point in curve],
            )
        },
        title=f"Pathfinder {task.size} × {task.size}, stages 0 to {last_stage}",
        x="images",
        y="accuracy",
        level=(GOALS[task.size], "the paper's, on its test") if task.size in GOALS else None,
    )


def reserve(options, record: Record) -> float:
    """Seconds to keep for the test, from the speed that the curve shows; 30 before there is one."""
    if not options.test or options.smoke:
        return 0.0
    speeds = [p["steps_a_second"] for p in record.data["curve"] if p["steps_a_second"]]
    if not speeds:
        return 30.0
    return 20 + options.test / (3 * options.batch * max(speeds[-5:]))


if __name__ == "__main__":
    common.entry(main)
