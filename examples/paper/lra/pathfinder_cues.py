"""How many labels of Pathfinder follow from the two dots alone, without the contours between them.

    python examples/paper/lra/pathfinder_cues.py            # minutes on a CPU
    python examples/paper/lra/pathfinder_cues.py --smoke    # a check: seconds

The dots of an image have a distance, and each a dash beside it, which points to the other dot or
not. A threshold on one of these three is chosen by half of the images, and tells labels of the
other half. What it tells beyond 50 % is known without following a contour. Which dot is on a start
is taken as known, though an image does not show it: a model can know less by these three.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common
import torch
from common import Record
from pathfinder_data import TASKS, Images, generate
from torch import Tensor

SEED = 1 << 61  # neither trained on nor tested on


def cues(images: Images, paddles: int) -> dict[str, Tensor]:
    """By name, float32 (images,); ``paddles`` of each of the two contours."""
    dots = images.markers  # (images, 2, y and x)
    dashes = images.paddles[:, : 2 * paddles]  # (images, dashes of both contours, 2 ends, y and x)
    found = {"distance of the dots": (dots[:, 0] - dots[:, 1]).norm(dim=1)}
    each = torch.arange(len(dots), device=dots.device)
    for i, name in enumerate(("the first dash", "the last dash")):
        dot, other = dots[:, i], dots[:, 1 - i]
        to_ends = (dashes - dot[:, None, None]).norm(dim=-1)
        nearest = to_ends.amin(-1).argmin(1)
        near = to_ends[each, nearest].argmin(1)
        begins, ends = dashes[each, nearest, near], dashes[each, nearest, 1 - near]
        found[f"direction of {name}"] = torch.cosine_similarity(ends - begins, other - begins)
    return found


def told(cue: Tensor, labels: Tensor) -> int:
    """Labels of the second half that the best threshold of the first half tells."""
    half = len(cue) // 2
    values = cue[:half].sort().values
    thresholds = (values[1:] + values[:-1]) / 2
    right = ((cue[:half, None] > thresholds) == labels[:half, None]).float().mean(0)
    best = int((right - 0.5).abs().argmax())
    said = (cue[half:] > thresholds[best]) == (right[best] > 0.5)
    return int((said == labels[half:]).sum())


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--images", type=common.at_least(4), default=4000, help="of a size")
    options = parser.parse_args()
    sizes = [16] if options.smoke else [32, 64, 128, 256]
    options.images = 64 if options.smoke else options.images
    out = common.folder(options.out, "lra/pathfinder_cues", options.smoke)
    record = Record.of(options, out, "lra/pathfinder_cues", {"images": options.images})
    for size in sizes:
        if any(row["size"] == size for row in record.rows):
            continue
        images = generate(TASKS[size], options.images, SEED, options.device)
        tested = options.images - options.images // 2
        for name, cue in cues(images, TASKS[size].paddles).items():
            right = told(cue, images.labels == 1)
            low, high = common.wilson(right, tested)
            record.row(size=size, cue=name, accuracy=right / tested, low=low, high=high)
            print(f"{size:4} {name:28} {100 * right / tested:.1f} % of {tested} labels")
        best = max(row["accuracy"] for row in record.rows if row["size"] == size)
        record.result[f"best at {size}"] = best
        record.save()


if __name__ == "__main__":
    common.entry(main)
