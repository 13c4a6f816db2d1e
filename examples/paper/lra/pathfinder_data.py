"""Pathfinder images, drawn anew for every training step, after the papers' descriptions.

    python examples/paper/lra/pathfinder_data.py --size 32        # a sheet of images as PNG

An image shows two long dashed contours, shorter ones that distract, and two dots (Linsley et al.,
arXiv 1805.08315; Long Range Arena, arXiv 2011.04006). The label says whether one contour joins the
dots. ``TASKS`` holds the sizes in pixels that Long Range Arena publishes: contours of 14 paddles,
at 32, 64, 128 (Path-X) and 256 (Path-256). The margin that it publishes is on both sides of a gap,
so a gap is two margins. Other contours come as near as a gap, so nearness tells nothing.

All images of a batch grow together, paddle by paddle, as tensors on any device. The same seed on
the same kind of device gives the same images.

The two contours start near each other, and are drawn before the label is. One dot is on a start,
the other on an end: of the same contour, or of the other one. Which contour has the first dot is
drawn too. So each dot alone, and all the ink, have the same distribution under both labels. What
two dots tell together is not balanced: how far apart they are, and where the dashes beside them
point. pathfinder_cues.py measures it. In the published images such cues exist as well, as both
contours start at a given distance there too.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

FAR = 1e4  # pixels: where a paddle is that could not be placed
SECOND_TRIES = 8  # at the second contour of an image
SHORT_TRIES = 5  # at each short one


@dataclass(frozen=True)
class Task:
    """Lengths in pixels, but for the three counts."""

    size: int  # of the image, a square
    paddle: float  # length of a dash
    gaps: tuple[float, ...]  # between the dashes of a contour; an image has one of them
    thickness: float
    radius: float  # of a dot
    seeds: float  # from the start of the first contour to that of the second
    turns: float  # a contour turns by at most 90 degrees / turns, where it is free to
    paddles: int = 14  # of each of the two long contours
    distractors: int = 5  # short contours
    distractor_paddles: int = 4

    @property
    def pitch(self) -> float:
        """From one dash to the next: the length that the model's positions are counted in."""
        return self.paddle + sum(self.gaps) / len(self.gaps)

    def easier(self, paddles: int, distractors: int) -> Task:
        return replace(self, paddles=paddles, distractors=distractors)


TASKS = {
    task.size: task
    for task in (
        # Not of the papers: small enough for a CPU.
        Task(16, 2, (1,), thickness=0.5, radius=1.5, seeds=4, turns=1, paddles=5, distractors=1),
        Task(24, 2, (1,), thickness=0.5, radius=1.5, seeds=5, turns=1, paddles=8, distractors=2),
        # Published as 1; whole pixels add to the turns, which deviate by 0.69 radians.
        Task(32, 2, (2,), thickness=0.5, radius=1.5, seeds=7, turns=0.82, distractors=5),
        Task(64, 5, (2,), thickness=1.0, radius=2.5, seeds=12, turns=1.8, distractors=5),
        Task(128, 5, (4, 6), thickness=1.5, radius=3, seeds=20, turns=1.8, distractors=8),
        Task(256, 5, (6,), thickness=2.0, radius=5, seeds=27, turns=1.8, distractors=7),
    )
}


@dataclass
class Images:
    pixels: Tensor  # uint8 (images, size, size)
    labels: Tensor  # int64 (images,): 1 where one contour joins the dots
    # int8 (images, size, size): dots on the contour that the pixel belongs to, 0 to 2, and -1
    # where there is no contour. Only --teach looks at it.
    dots: Tensor
    paddles: Tensor  # float32 (images, paddles, 2 ends, 2): y and x; FAR where there is none
    markers: Tensor  # float32 (images, 2, 2): y and x of the dots, of the start first

    def __len__(self) -> int:
        return len(self.labels)


def generate(task: Task, count: int, seed: int, device: torch.device | str = "cpu") -> Images:
    """``count`` images, a function of task, count, seed and the kind of device alone."""
    # Of a seed, the generator of a CPU takes the low 32 bits: all bits of ours are mixed into them.
    digest = hashlib.blake2b(str(seed).encode(), digest_size=7).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    have = 0
    # Enough to fill a GPU; a CPU is faster with what its cache holds.
    most = (2**21 if torch.device(device).type == "cuda" else 2**16) // task.paddles
    share = 0.25  # of the tries that become an image; what the last round saw, from the second on
    while have < count:
        tries = min(int((count - have) / share * 1.1) + 64, most)
        grown = _grow(task, tries, generator)
        have += len(grown[0])
        share = max(len(grown[0]) / tries, 0.02)
        parts.append(grown)
    paddles, markers, labels = (torch.cat(tensors)[:count] for tensors in zip(*parts))
    at_once = max(1, 2**24 // task.size**2)
    drawn = [
        _draw(task, *piece)
        for piece in zip(paddles.split(at_once), markers.split(at_once), labels.split(at_once))
    ]
    pixels, dots = (torch.cat(tensors) for tensors in zip(*drawn))
    return Images(pixels, labels, dots, paddles, markers)


class _Grower:
    """Grows contours paddle by paddle. Of a paddle three points are kept: start, middle, end."""

    STARTS = 16  # tries for a contour's first paddle
    GENTLE, SHARP = 8, 8  # tries for each next one; sharp turns are for where the way is blocked

    def __init__(self, task: Task, generator: torch.Generator):
        self.task, self.generator, self.device = task, generator, generator.device

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def directions(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Angles, and unit vectors (…, 2): y and x."""
        angle = self.uniform(*shape) * 2 * math.pi
        return angle, torch.stack([angle.sin(), angle.cos()], -1)

    def _inside(self, candidates: Tensor) -> Tensor:
        """Whether (batch, candidates, points, 2) lie in the image: bool (batch, candidates)."""
        edge = 1 + self.task.thickness / 2
        return ((candidates >= edge) & (candidates <= self.task.size - edge)).flatten(2).all(-1)

    def turned(self, *shape: int) -> Tensor:
        """Angles of density cos²(turns · angle): the sine is uniform in a disc, seen from aside."""
        across = self.uniform(*shape).sqrt() * (self.uniform(*shape) * 2 * math.pi).cos()
        return across.asin() / self.task.turns

    @staticmethod
    def _clear(candidates: Tensor, others: Tensor, least: Tensor) -> Tensor:
        """Whether they keep the distances (batch,) to all of (batch, points, 2): bool."""
        if others.shape[1] == 0:
            return torch.ones(candidates.shape[:2], dtype=torch.bool, device=candidates.device)
        mine = candidates.flatten(1, 2)
        square = (mine[:, :, None, 0] - others[:, None, :, 0]).square_()
        square += (mine[:, :, None, 1] - others[:, None, :, 1]).square_()
        return square.amin(-1).unflatten(1, candidates.shape[1:3]).amin(-1) >= least[:, None] ** 2

    def contour(
        self, others: Tensor, gap: Tensor, paddles: int, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One contour beside others (batch, paddles, 3, 2); gap (batch,) is that of the image.

        Where starts (batch, STARTS, 2) are given it begins at one of them.

        Returns the rows of the batch where it found room, ascending, and its points (rows, paddles,
        3, 2). Rows that are stuck leave at once, so that the others cost less.
        """
        task, batch = self.task, len(others)
        steps = torch.tensor([0.0, 0.5, 1.0], device=self.device)[:, None] * task.paddle
        others = others.flatten(1, 2)
        begins = starts
        if begins is None:
            begins = self.uniform(batch, self.STARTS, 2) * task.size
        angle, towards = self.directions(batch, self.STARTS)
        candidates = begins[:, :, None] + steps * towards[:, :, None]
        rows = torch.arange(batch, device=self.device)
        mine = torch.empty(batch, 0, 3, 2, device=self.device)
        fits = self._inside(candidates) & self._clear(candidates, others, gap + task.thickness)
        while True:
            stay = fits.any(1).nonzero()[:, 0]
            first = fits[stay].byte().argmax(1)
            mine = torch.cat([mine[stay], candidates[stay, first][:, None]], 1)
            rows, angle = rows[stay], angle[stay, first]
            others, gap = others[stay], gap[stay]
            if mine.shape[1] == paddles:
                return rows, mine
            before = angle[:, None]
            turn = self.turned(len(rows), self.GENTLE + self.SHARP)
            turn[:, self.GENTLE :] *= task.turns  # up to 90 degrees
            angle = before + turn
            # A turn is shared by the two halves of the gap, so that both ways look the same.
            towards = torch.stack([angle.sin(), angle.cos()], -1)
            along = torch.stack([before.sin(), before.cos()], -1) + towards
            along = along * (gap / 2)[:, None, None]
            candidates = (mine[:, -1:, 2] + along)[:, :, None] + steps * towards[:, :, None]
            # All but the paddle that this one goes on from; its start is near that one's end.
            near = torch.cat([others, mine[:, :-1].flatten(1, 2)], 1)
            fits = self._inside(candidates) & self._clear(candidates, near, gap + task.thickness)


def _grow(task: Task, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Paddles, dots and labels of those of ``batch`` tries that found room for both contours."""
    grower = _Grower(task, generator)
    which = (grower.uniform(batch) * len(task.gaps)).long()
    gap = torch.tensor([float(gap) for gap in task.gaps], device=grower.device)[which]
    nothing = torch.empty(batch, 0, 3, 2, device=grower.device)
    # The first contour starts far from the border, so that the second finds room around it.
    edge = min(2 * task.seeds, task.size / 2 - 2)
    starts = edge + grower.uniform(batch, grower.STARTS, 2) * (task.size - 2 * edge)
    rows, first = grower.contour(nothing, gap, task.paddles, starts)
    gap = gap[rows]
    # The second one is tried several times, and the first success counts.
    again = torch.arange(len(first), device=grower.device).repeat_interleave(SECOND_TRIES)
    _, towards = grower.directions(len(again), grower.STARTS)
    starts = first[again, :1, 0] + task.seeds * towards
    rows, second = grower.contour(first[again], gap[again], task.paddles, starts)
    rows = again[rows]
    fresh = torch.ones_like(rows, dtype=torch.bool)
    fresh[1:] = rows[1:] != rows[:-1]
    rows, second = rows[fresh], second[fresh]
    first, gap = first[rows], gap[rows]
    # Nothing below tells the first contour that was drawn from the second one.
    swap = (grower.uniform(len(rows)) < 0.5)[:, None, None, None]
    first, second = torch.where(swap, second, first), torch.where(swap, first, second)
    points = torch.cat([first, second], 1)
    for _ in range(task.distractors):
        # Where there is no room for one, the image has one less.
        added = torch.full((len(points), task.distractor_paddles, 3, 2), FAR, device=grower.device)
        left = torch.arange(len(points), device=grower.device)
        for _ in range(SHORT_TRIES):
            rows, short = grower.contour(points[left], gap[left], task.distractor_paddles)
            added[left[rows]] = short
            left = left[added[left, 0, 0, 0] == FAR]
        points = torch.cat([points, added], 1)
    labels = (grower.uniform(len(points)) < 0.5).long()
    end = torch.where(labels[:, None] == 1, first[:, -1, 2], second[:, -1, 2])
    return points[:, :, ::2], torch.stack([first[:, 0, 0], end], 1), labels


def _draw(task: Task, paddles: Tensor, markers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels and dots of a piece of the batch."""
    device, batch = paddles.device, len(paddles)
    # How many dots the contour of each paddle carries.
    count = torch.zeros(batch, paddles.shape[1], device=device)
    count[:, : task.paddles] = (1 + labels)[:, None].float()
    count[:, task.paddles : 2 * task.paddles] = (1 - labels)[:, None].float()
    shown = paddles[:, :, 0, 0] < FAR / 2

    image = torch.zeros(batch, task.size**2, device=device)
    dots = torch.full((batch, task.size**2), -1.0, device=device)

    def ink(centre: Tensor, reach: float, coverage, value: Tensor, shown: Tensor) -> None:
        """Adds what ``coverage`` gives for the pixels (batch, shapes, window², 2) around."""
        half = math.ceil(reach + 1)
        offset = torch.arange(-half, half + 1, device=device)
        window = torch.stack(torch.meshgrid(offset, offset, indexing="ij"), -1).flatten(0, 1)
        at = centre.floor().long()[:, :, None] + window
        cover = coverage(at + 0.5)
        inside = ((at >= 0) & (at < task.size)).all(-1) & shown[:, :, None]
        cover = (cover * inside).flatten(1)
        index = (at[..., 0] * task.size + at[..., 1]).clamp(0, task.size**2 - 1).flatten(1)
        image.scatter_reduce_(1, index, cover, "amax")
        known = torch.where(cover >= 0.25, value[:, :, None].expand_as(inside).flatten(1), -1.0)
        dots.scatter_reduce_(1, index, known, "amax")

    start, end = paddles[:, :, None, 0], paddles[:, :, None, 1]
    along = end - start

    def line(pixel: Tensor) -> Tensor:
        share = (((pixel - start) * along).sum(-1) / task.paddle**2).clamp(0, 1)
        far = (pixel - start - share[..., None] * along).norm(dim=-1)
        return (task.thickness / 2 + 0.5 - far).clamp(0, 1)

    def disc(pixel: Tensor) -> Tensor:
        return (task.radius + 0.5 - (pixel - markers[:, :, None]).norm(dim=-1)).clamp(0, 1)

    ink((paddles.sum(2) / 2), task.paddle / 2 + task.thickness, line, count, shown)
    on = (1.0 + labels)[:, None].expand(batch, 2)
    ink(markers, task.radius, disc, on, torch.ones_like(on, dtype=torch.bool))
    shape = (batch, task.size, task.size)
    return (image * 255).round().byte().view(shape), dots.to(torch.int8).view(shape)


def main() -> None:
    import time

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=32, choices=TASKS)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("pathfinder.png"))
    arguments = parser.parse_args()
    started = time.perf_counter()
    images = generate(TASKS[arguments.size], arguments.count, arguments.seed, arguments.device)
    labels = images.labels.tolist()
    print(f"{arguments.count / (time.perf_counter() - started):.0f} images a second")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = min(24, arguments.count)
    figure, axes = plt.subplots(4, 6, figsize=(12, 8.6), layout="constrained")
    for axis, pixels, label in zip(axes.flat, images.pixels[:shown].cpu(), labels):
        axis.imshow(pixels, cmap="gray", vmin=0, vmax=255)
        axis.set_title("joined" if label else "not joined")
        axis.set_axis_off()
    figure.savefig(arguments.out, dpi=80)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
