"""examples/paper/lra/pathfinder.py: its images are right, and its training resumes."""

import importlib
import json
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

pytest_plugins = ["paper_programs"]


@pytest.mark.parametrize("teach", [0, 1])
def test_pathfinder_resumes_to_the_bit(program, tmp_path, teach):
    """Two runs of half the images end where one of all does, with a loss for each pixel and not."""

    def train(out, *more):
        small = [
            "--size",
            16,
            "--layers",
            1,
            "--heads",
            1,
            "--batch",
            16,
            "--pool",
            64,
            "--test",
            0,
            "--teach",
            teach,
        ]
        program("lra/pathfinder.py", *small, "--device", "cpu", "--out", out, *more)
        return torch.load(out / "checkpoint.pt", weights_only=True)

    whole = train(tmp_path / "whole", "--images", 96)
    train(tmp_path / "parts", "--images", 96, "--minutes", 0.0)  # stops before the first step
    # A stop in the middle of a pool, as the minutes would do.
    train(tmp_path / "parts", "--images", 48)
    parts = train(tmp_path / "parts", "--images", 96)
    for name, value in whole["model"].items():
        assert torch.equal(value, parts["model"][name]), name
    assert {**whole["state"], "seconds": 0} == {**parts["state"], "seconds": 0}
    record = json.loads((tmp_path / "parts" / "record.json").read_text())
    # The one without a step is no run.
    assert len(record["runs"]) == 2 and [p["run"] for p in record["curve"]] == [0, 1]


def test_pathfinder_goes_on_with_larger_images(program, tmp_path):
    """--start takes the weights of a model of smaller images, and the record says so."""
    small = ["--layers", 1, "--heads", 1, "--test", 0, "--device", "cpu", "--batch", 16]
    first = ["--size", 16, "--images", 16, "--teach", 0.5, "--out", tmp_path / "a"]
    program("lra/pathfinder.py", *small, *first)
    start = tmp_path / "a" / "checkpoint.pt"
    more = ["--size", 24, "--images", 0, "--start", start, "--out", tmp_path / "b"]
    program("lra/pathfinder.py", *small, *more)
    one, two = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"] for name in "ab"
    )
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    record = json.loads((tmp_path / "b" / "record.json").read_text())
    assert record["result"]["started_from"]["images"] == 16
    # What the first one was taught goes with its weights.
    assert record["result"]["teach"] == 0.5


@pytest.mark.parametrize("size", [32, 64, 128])
def test_labels_are_those_of_the_contours(paper, size):
    """Walks from dash to dash, over gaps, from one dot; and the label's other end is met or not."""
    data = importlib.import_module("pathfinder_data")
    task = data.TASKS[size]
    images = data.generate(task, 24, seed=1)
    assert set(images.labels.tolist()) == {0, 1}
    for paddles, markers, label in zip(images.paddles, images.markers, images.labels):
        there = paddles[paddles[:, 0, 0] < data.FAR / 2]
        tips = there.numpy()  # (paddles, 2, 2)
        ends = tips.reshape(-1, 2)
        apart = np.linalg.norm(ends[:, None] - ends[None], axis=-1)
        gap = paddles[1, 0] - paddles[0, 1]  # shorter than the gap where the contour turns
        gap = min(g for g in task.gaps if g * 1.01 > gap.norm())
        joined = (apart < gap * 1.01).reshape(len(tips), 2, len(tips), 2).any((1, 3))
        at = [np.linalg.norm(tips - m.numpy(), axis=-1).min(1).argmin() for m in markers]
        reached = np.zeros(len(tips), bool)
        reached[at[0]] = True
        for _ in range(len(tips)):
            reached = joined[reached].any(0)
        assert reached[at[1]] == bool(label)
        assert reached.sum() == task.paddles  # contours do not touch


@pytest.mark.parametrize("size", [64, 128])
def test_images_show_what_is_labelled(paper, size):
    """Ink on each dash's middle and on the dots; none in the middle of gaps, but under a dot."""
    data = importlib.import_module("pathfinder_data")
    images = data.generate(data.TASKS[size], 20, seed=2)
    rows = torch.arange(len(images))[:, None]

    def at(points):
        y, x = points.floor().long().unbind(-1)
        return images.pixels[rows, y, x].float()

    assert (at(images.markers) == 255).all()
    long = images.paddles[:, :28]
    assert (at(long.mean(2)) > 70).all()
    gaps = ((long[:, 1:, 0] + long[:, :-1, 1]) / 2)[:, [i for i in range(27) if i != 13]]
    free = torch.cdist(gaps, images.markers).amin(-1) > data.TASKS[size].radius + 2
    assert at(gaps)[free].mean() < at(long.mean(2)).mean() / 2


def test_no_shortcut_tells_the_label(paper):
    """Ink, and each dot alone, where it is and what is around: the same under both labels.

    Means of a dot's place would be those of the middle whatever it is, so the distance from there
    is compared. Around a dot are the dashes, but not the other dot: two dots tell more than one.
    """
    data = importlib.import_module("pathfinder_data")
    images = data.generate(data.TASKS[16], 4000, seed=3)
    features = {"ink": images.pixels.float().mean((1, 2))}
    features["dashes"] = (images.paddles[:, :, 0, 0] < data.FAR / 2).float().sum(1)
    for i in (0, 1):
        dot = images.markers[:, i]
        features[f"{i} from the middle"] = (dot - 8).norm(dim=1)
        features[f"{i} from the border"] = torch.minimum(dot, 16 - dot).amin(1)
        near = (images.paddles - dot[:, None, None]).norm(dim=-1).amin(-1).sort(1).values
        features[f"{i} to the next dash"], features[f"{i} to the third"] = near[:, 1], near[:, 2]
        features[f"{i} dashes around"] = (near < 4).float().sum(1)
    yes = images.labels == 1
    for name, feature in features.items():
        order = feature.unique()  # Kolmogorov-Smirnov: all of the distribution, not its mean alone
        one, other = (
            torch.searchsorted(feature[rows].sort().values, order, right=True) / rows.sum()
            for rows in (yes, ~yes)
        )
        critical = 2.2 * math.sqrt(len(yes) / (yes.sum() * (~yes).sum()))  # 1 in 8000
        assert (one - other).abs().max() < critical, name
    assert abs(yes.float().mean() - 0.5) < 0.04


def test_cues(paper):
    """A threshold is chosen by the first half alone, and a cue of both signs counts."""
    cues = importlib.import_module("pathfinder_cues")
    labels = torch.arange(40) % 2 == 0
    shift = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 0.1
    for sign in (1, -1):
        assert cues.told(sign * (labels + shift), labels) == 20
    opposite = torch.cat([labels[:20], ~labels[20:]])
    assert cues.told(opposite + shift, labels) == 0
    # By hand: the dash beside each dot, and the angle between it and the way to the other dot.
    data = importlib.import_module("pathfinder_data")
    images = data.generate(data.TASKS[16], 2, seed=1)
    images.markers = torch.tensor([[[0.0, 0.0], [0.0, 10.0]]] * 2)
    images.paddles = torch.full((2, 30, 2, 2), data.FAR)
    images.paddles[:, 0] = torch.tensor([[0.0, 3.0], [0.0, 1.0]])  # towards the other dot
    images.paddles[:, 1] = torch.tensor([[9.0, 9.0], [2.0, 9.0]])
    images.paddles[1, 27] = torch.tensor([[1.0, 10.0], [2.0, 10.0]])  # aside
    found = cues.cues(images, 14)
    assert found["distance of the dots"].tolist() == [10, 10]
    assert found["direction of the first dash"].tolist() == pytest.approx([1, 1])
    away = np.array([7.0, 0.0]) @ np.array([-2.0, -9.0]) / (7 * math.hypot(2, 9))
    aside = np.array([1.0, 0.0]) @ np.array([-1.0, -10.0]) / math.hypot(1, 10)
    assert found["direction of the last dash"].tolist() == pytest.approx([away, aside])


def test_contours_are_as_near_as_their_dashes(paper):
    """What joins two dashes is their direction: a gap is as wide as other contours are near."""
    data = importlib.import_module("pathfinder_data")
    task = data.TASKS[32]
    images = data.generate(task, 60, seed=4)
    gaps = (images.paddles[:, 1:14, 0] - images.paddles[:, :13, 1]).norm(dim=-1)
    assert gaps.max() <= 2 * 1.001 and gaps.mean() > 1.8  # two margins of 1
    ends = images.paddles[:, :28].flatten(1, 2)
    between = (ends[:, :28, None] - ends[:, None, 28:]).norm(dim=-1).amin((1, 2))
    assert between.min() >= (2 + task.thickness) * 0.999 and between.min() < 3


def test_images_follow_from_the_seed(paper):
    data = importlib.import_module("pathfinder_data")
    one, two, other, far = (data.generate(data.TASKS[16], 50, s) for s in (5, 5, 6, 5 + (1 << 40)))
    assert torch.equal(one.pixels, two.pixels) and torch.equal(one.labels, two.labels)
    assert not torch.equal(one.pixels, other.pixels)
    assert not torch.equal(one.pixels, far.pixels)  # the high bits count: tests are told by them


def test_dots_of_pixels(paper):
    """What --teach teaches: two dots or none under a label of 1, one or none under 0."""
    data = importlib.import_module("pathfinder_data")
    images = data.generate(data.TASKS[32], 40, seed=7)
    for dots, label, pixels in zip(images.dots, images.labels, images.pixels):
        assert set(dots.unique().tolist()) == ({-1, 0, 2} if label else {-1, 0, 1})
        assert (pixels[dots >= 0] >= 60).all() and (pixels[dots < 0] < 70).all()


def test_tiles_and_layout(paper):
    pathfinder = importlib.import_module("pathfinder")
    for size in (16, 24, 32, 128, 256, 64):
        order = pathfinder.tiled(size)
        assert torch.equal(order.sort().values, torch.arange(size * size))
    block = order[:128]  # a piece of 8 × 16 pixels
    assert (block // 64).max() == 7 and (block % 64).max() == 15
    mask = pathfinder.near_and_butterfly(64, radius=8)
    assert mask.to_dense(block_level=True)[0, 0].diagonal().all()
