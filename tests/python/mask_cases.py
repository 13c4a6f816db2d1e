"""Masks by their definitions, element by element, in plain loops."""

import functools

import numpy as np
from flashsdk.masks import Band, Causal, Csr, SlidingWindow

BANDS = [
    Band(),
    Causal(),
    Causal("top_left"),
    SlidingWindow(20, 0),
    SlidingWindow(37, 5, "top_left"),
    SlidingWindow(-3, 40),
    SlidingWindow(None, -18),
    SlidingWindow(60, -30),
    Band(-7, 2, "top_left"),  # sees nothing
    SlidingWindow(0, 0),
    SlidingWindow(11, None, "top_left"),
]
LENGTHS = [(64, 64), (1, 1), (1, 90), (90, 1), (33, 97), (97, 33), (80, 79), (16, 128)]


def sees(band, i, j, seqlen_q, seqlen_k):
    at = i + (seqlen_k - seqlen_q if band.alignment == "bottom_right" else 0)
    after_left = band.left is None or j >= at - band.left
    return after_left and (band.right is None or j <= at + band.right)


@functools.cache
def elements(band, seqlen_q, seqlen_k):
    """bool (seqlen_q, seqlen_k), by the definition."""
    rows = [
        [sees(band, i, j, seqlen_q, seqlen_k) for j in range(seqlen_k)] for i in range(seqlen_q)
    ]
    return np.array(rows, bool).reshape(seqlen_q, seqlen_k)


def pairs(lists: Csr):
    """The (batch, head, line, other) of every listed block, in the order of the list."""
    offsets, indices = lists
    found = []
    for b, h, line in np.ndindex(*offsets.shape[:2], offsets.shape[2] - 1):
        others = indices[offsets[b, h, line] : offsets[b, h, line + 1]].tolist()
        assert others == sorted(set(others)), "ascending, each once"
        found += [(b, h, line, other) for other in others]
    assert len(found) == indices.size
    return found
