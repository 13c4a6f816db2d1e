"""Pathfinder images, drawn anew for every training step, after the papers' descriptions.

    python examples/paper/lra/pathfinder_data.py --size 32        # a sheet of images as PNG

An image shows two long dashed contours, shorter ones that distract, and two dots (Linsley et al.,
arXiv 1805.08315; Long Range Arena, arXiv 2011.04006). The label says whether one contour joins the
dots. ``TASKS`` holds the sizes in pixels that Long Range Arena publishes: contours of 14 paddles,
at 32, 64, 128 (Path-X) and 256 (Path-256).

All images of a batch grow together, paddle by paddle, as tensors on any device. The same seed on
the same kind of device gives the same images.

No shortcut tells the label: both contours are drawn before the label is, and the second one starts
as far from the first dot as the first one ends. So the distance of the dots, where they are, and
the amount of ink have the same distribution under both labels.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

FAR = 1e4  # pixels: where a paddle is that could not be placed
SECOND_TRIES = 8  # at the second contour of an image, where the image is crowded; else 2


@dataclass(frozen=True)
class Task:
    """Lengths in pixels, but for the three counts."""

    size: int  # of the image, a square
    paddle: float  # length of a dash
    gap: float  # between the dashes of a contour
    thickness: float
    radius: float  # of a dot
    paddles: int = 14  # of each of the two long contours
    distractors: int = 5  # short contours
    distractor_paddles: int = 4

    @property
    def pitch(self) -> float:
        """From one dash to the next: the length that the model's positions are counted in."""
        return self.paddle + self.gap

    @property
    def clearance(self) -> float:
        """Least distance of two contours: more than the gap, so that the eye can tell them."""
        return self.gap + self.thickness + 1

    @property
    def room(self) -> float:
        """Least distance of a dot and another contour than its own."""
        return self.radius + self.thickness / 2 + 1

    def easier(self, paddles: int, distractors: int) -> Task:
        return replace(self, paddles=paddles, distractors=distractors)


TASKS = {
    task.size: task
    for task in (
        # Not of the papers: small enough for a CPU.
        Task(16, paddle=2, gap=1, thickness=0.5, radius=1.5, paddles=5, distractors=1),
        Task(24, paddle=2, gap=1, thickness=0.5, radius=1.5, paddles=8, distractors=2),
        Task(32, paddle=2, gap=1, thickness=0.5, radius=1.5, distractors=5),
        Task(64, paddle=5, gap=1, thickness=1.0, radius=2.5, distractors=5),
        Task(128, paddle=5, gap=2.5, thickness=1.5, radius=3, distractors=8),
        Task(256, paddle=5, gap=3, thickness=2.0, radius=5, distractors=7),
    )
}


@dataclass
class Images:
    pixels: Tensor  # uint8 (images, size, size)
    labels: Tensor  # int64 (images,): 1 where one contour joins the dots
    # int8 (images, size, size): dots on the contour that the pixel belongs to, 0 to 2, and -1
    # where there is no contour. Only training may look at it.
    dots: Tensor
    paddles: Tensor  # float32 (images, paddles, 2 ends, 2): y and x; FAR where there is none
    markers: Tensor  # float32 (images, 2, 2): y and x of the dots

    def __len__(self) -> int:
        return len(self.labels)


def generate(task: Task, count: int, seed: int, device: torch.device | str = "cpu") -> Images:
    """``count`` images, a function of task, count, seed and the kind of device alone."""
    generator = torch.Generator(device).manual_seed(seed)
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
    GENTLE, SHARP = 6, 6  # tries for each next one; sharp turns are for where the way is blocked

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

    @staticmethod
    def _clear(candidates: Tensor, others: Tensor, least: float) -> Tensor:
        """Whether they keep the distance to all of (batch, points, 2): bool (batch, candidates)."""
        if others.shape[1] == 0:
            return torch.ones(candidates.shape[:2], dtype=torch.bool, device=candidates.device)
        mine = candidates.flatten(1, 2)
        square = (mine[:, :, None, 0] - others[:, None, :, 0]).square_()
        square += (mine[:, :, None, 1] - others[:, None, :, 1]).square_()
        return square.amin(-1).unflatten(1, candidates.shape[1:3]).amin(-1) >= least**2

    def contour(
        self, others: Tensor, dots: Tensor, paddles: int, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One contour beside others (batch, paddles, 3, 2) and their dots (batch, dots, 2).

        Where starts (batch, STARTS, 2) are given it begins at one of them, with a dot.

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
        fits = self._inside(candidates) & self._clear(candidates, others, task.clearance)
        fits &= self._clear(candidates, dots, task.room)
        if starts is not None:
            fits &= self._clear(starts[:, :, None], others, task.room)
        while True:
            stay = fits.any(1).nonzero()[:, 0]
            first = fits[stay].byte().argmax(1)
            mine = torch.cat([mine[stay], candidates[stay, first][:, None]], 1)
            rows, angle = rows[stay], angle[stay, first]
            others, dots = others[stay], dots[stay]
            if mine.shape[1] == paddles:
                return rows, mine
            shape = (len(rows), self.GENTLE + self.SHARP)
            turn = torch.randn(shape, generator=self.generator, device=self.device)
            turn[:, : self.GENTLE] *= 0.4
            angle = angle[:, None] + turn.clamp_(-1.05, 1.05)  # at most 60 degrees
            towards = torch.stack([angle.sin(), angle.cos()], -1)
            start = mine[:, -1:, 2] + task.gap * towards
            candidates = start[:, :, None] + steps * towards[:, :, None]
            # All but the paddle that this one goes on from; its start is near that one's end.
            near = torch.cat([others, mine[:, :-1].flatten(1, 2)], 1)
            ahead = candidates[:, :, 1:]
            fits = self._inside(ahead) & self._clear(ahead, near, task.clearance)
            fits &= self._clear(ahead, dots, task.room)


def _grow(task: Task, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Paddles, dots and labels of those of ``batch`` tries that found room for both contours."""
    grower = _Grower(task, generator)
    nothing = torch.empty(batch, 0, 3, 2, device=grower.device)
    _, first = grower.contour(nothing, nothing[:, :, 0], task.paddles)
    tips = torch.stack([first[:, 0, 0], first[:, -1, 2]], 1)
    swap = grower.uniform(len(tips)) < 0.5
    tips = torch.where(swap[:, None, None], tips.flip(1), tips)
    # The second contour starts on the circle around the first dot that the other tip lies on. It is
    # tried several times, and the first success counts.
    tries = SECOND_TRIES if task.paddles * task.pitch > task.size else 2
    again = torch.arange(len(tips), device=grower.device).repeat_interleave(tries)
    _, towards = grower.directions(len(again), grower.STARTS)
    distance = (tips[:, 0] - tips[:, 1]).norm(dim=-1)[again, None, None]
    starts = tips[again, :1] + distance * towards
    rows, second = grower.contour(first[again], tips[again], task.paddles, starts)
    rows = again[rows]
    fresh = torch.ones_like(rows, dtype=torch.bool)
    fresh[1:] = rows[1:] != rows[:-1]
    rows, second = rows[fresh], second[fresh]
    tips = tips[rows]
    points = torch.cat([first[rows], second], 1)
    dots = torch.cat([tips, second[:, :1, 0]], 1)  # all that there may be, whatever the label
    for _ in range(task.distractors):
        # Where there is no room for one, the image has one less.
        rows, short = grower.contour(points, dots, task.distractor_paddles)
        added = torch.full((len(points), task.distractor_paddles, 3, 2), FAR, device=grower.device)
        added[rows] = short
        points = torch.cat([points, added], 1)
    labels = (grower.uniform(len(tips)) < 0.5).long()
    other = torch.where(labels[:, None] == 1, tips[:, 1], second[:, 0, 0])
    return points[:, :, ::2], torch.stack([tips[:, 0], other], 1), labels


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
