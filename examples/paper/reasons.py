"""What of docs/paper.md falls short of the paper, or was done in another way, and why."""

from __future__ import annotations

import itertools
import math
import sys

from figures import LENGTHS, Record, best_step, longer, percent, ratio, seconds_of, times


def falls_short(found: dict[str, Record]) -> str:
    """What is below the paper's or was done in another way: how far it is from it, and why."""
    reasons = {
        "bert": why_bert,
        "gpt2-speed": why_gpt2,
        "gpt2-graphs": why_graphs,
        "long_context": why_context,
        "documents": why_documents,
        "arena": why_arena,
        "arena-listops": why_listops,
        "pathfinder128": why_pathfinder,
        "pathfinder_cues": why_cues,
        "attention": why_attention,
        "traffic": why_traffic,
        "tiles": why_tiles,
    }
    lines = []
    for name, why in reasons.items():
        try:
            if text := why(found[name]):
                lines.append(f"- {text}")
        except (KeyError, IndexError, ValueError):  # no record, or one without all that is compared
            if name in found:
                print(f"{name}: not all is there that its reason takes", file=sys.stderr)
    return "\n".join(["## What falls short or differs, and why", "", *lines])


def why_bert(record: Record) -> str:
    tokens = {
        row["method"]: row["tokens"]
        for row in record["rows"]
        if row.get("kind") == "documents" and not row["compiled"] and "tokens" in row
    }
    packed, padded = tokens["flashsdk"], tokens["SDPA"]
    plain, compiled = (
        ratio(record, "best_sdpa", 3, kind="documents", compiled=way) for way in (False, True)
    )
    return (
        f"**BERT-large: {plain}, and {compiled} with each layer compiled, of 1.15×.** The paper's "
        "baseline wrote its scores to memory, which PyTorch's backends do not. flashsdk packs "
        f"sequences, and so skips the {percent(1 - padded / packed)} of the rows that are padding. "
        f"That alone gives {times(packed / padded)} where time goes by rows."
    )


def why_gpt2(record: Record) -> str:
    seconds = seconds_of(record)
    sizes = ("small", "medium")
    plain, compiled, alike = (
        ", ".join(ratio(record, what, size=size, seqlen=1024, compiled=way) for size in sizes)
        for what, way in (("eager_as_shipped", False), ("eager_as_shipped", True), ("eager", True))
    )
    eager, ours = (1e3 * seconds["small", 1024, False, name] for name in ("eager", "flashsdk"))
    turns = {
        row["seqlen"]: f"{1e3 * row['fastest']:.0f} to {1e3 * row['slowest']:.0f} ms"
        for row in record["rows"]
        if (row["size"], row["compiled"], row["method"]) == ("medium", True, "flashsdk")
    }
    return (
        f"**GPT-2 small and medium against eager: {plain} of 3.5×, 3.0×, and small at 4K "
        f"{longer(record, False)} of 2.6×.** The paper compared whole "
        "programs. Here only the attention differs. A step of small takes "
        f"{ours:.0f} in place of {eager:.0f} ms, and most of that is the rest of the model. With "
        f"each layer compiled it is {compiled} beside eager as transformers ships it. Beside eager "
        f"compiled alike it is {alike}. Turns of flashsdk's compiled medium take "
        + ", ".join(f"{turns[n]} at {n}" for n in LENGTHS)
        + ". The fastest methods differ by less, so a ratio near 1 says little there. All methods"
        + f" of a problem took turns in one run: {of_runs(record)}."
    )


def of_runs(record: Record) -> str:
    """When each size was measured."""
    found: dict[str, list[str]] = {}
    for row in record["rows"]:
        found.setdefault(row["size"], []).append(record["runs"][row["run"]]["date"])
    return "; ".join(f"{size} {', '.join(dict.fromkeys(at))}" for size, at in found.items())


def why_graphs(record: Record) -> str:
    rows = [row for row in record["rows"] if row["compiled"] and "seconds" in row]
    spread = max(row["slowest"] / row["fastest"] - 1 for row in rows)
    seconds = seconds_of(record)

    def milliseconds(seqlen: int) -> tuple[str, str]:
        """Of small: with flashsdk, and with the fastest SDPA backend."""
        ours = seconds["small", seqlen, True, "flashsdk"]
        best = best_step(record, "small", seqlen)["seconds"]
        return f"{1e3 * ours:.1f}", f"{1e3 * best:.1f}"

    (ours, best), (ours_4k, best_4k) = milliseconds(1024), milliseconds(4096)
    return (
        "**GPT-2 with CUDA graphs is the time of the card alone.** The graph holds all kernels of "
        "a step, and the host starts it with one call. Each layer is compiled before, as in the "
        "rows above. Turns of one captured method differ by at most "
        f"{percent(spread)}. A step of small takes {ours} ms with flashsdk and {best} with the "
        f"best SDPA backend at 1024, {ours_4k} and {best_4k} at 4096. It has as many tokens at "
        "each length, so the rest of the model takes as long. The memory of captured steps counts "
        "eager's masks in every row."
    )


def why_context(record: Record) -> str:
    at = {(row["seqlen"], row["steps"]): row for row in record["rows"]}
    steps = [n for length, n in at if length == 4096]
    gains = [(at[1024, n]["perplexity"] - at[4096, n]["perplexity"], n) for n in steps]
    shown = ", ".join(f"{gain:.2f} after {n}" for gain, n in gains[3::4])
    lowest = [
        min((at[length, n] for n in steps), key=lambda row: row["perplexity"])
        for length in (1024, 4096)
    ]
    passes = lowest[-1]["tokens"] / record["result"]["text_tokens"]
    trained = [
        math.exp(
            [
                point["loss"]
                for point in record["curve"]
                if point["seqlen"] == row["seqlen"]
                and point["steps_before"]
                and point["step"] <= row["steps"]
            ][-1]
        )
        for row in lowest
    ]
    turns = [at[1024, n]["perplexity"] for n in steps[-4:]]
    jump = max(abs(a - b) for a, b in itertools.pairwise(turns))
    return (
        "**GPT-2 with more context is not the paper's training.** It reads code and documentation "
        f"of the machine, {passes:.0f} times over, and fits it more closely than new text: its own "
        f"perplexity is {trained[0]:.1f} at 1024 and {trained[1]:.1f} at 4096 by then. The gain "
        f"grows with the steps: {shown}. Part of it is that the shorter context fits the training "
        "text more closely, and new text less. The lowest is chosen by the windows that are "
        f"reported, of one seed. In the last turns 1024 goes up or down by as much as {jump:.2f}."
    )


def why_documents(record: Record) -> str:
    lengths = [row["seqlen"] for row in record["rows"]]
    return (
        "**Long documents are sources of Python.** The paper classifies medical and legal texts, "
        "and its figure is the mean of two data sets. Here the label is the package that a file "
        f"belongs to. Of each file the first N tokens are read, N from {min(lengths)} to "
        f"{max(lengths)}. Imports, comments at the top and the package's name are taken out; a "
        "docstring at the top stays."
    )


def why_arena(record: Record) -> str:
    kinds: dict[str, list[str]] = {}
    for row in record["rows"]:
        kinds.setdefault(row["data"], []).append(row["task"])
    data = "; ".join(f"{', '.join(dict.fromkeys(tasks))}: {kind}" for kind, tasks in kinds.items())
    return (
        "**Long Range Arena's accuracy is of two tasks.** ListOps and Pathfinder are drawn by "
        "generators of this project, after the benchmark's description. The benchmark's own files "
        "are not used, and three tasks have no other data. So neither the paper's mean accuracy "
        f"nor that of block-sparse attention is repeated. What is timed reads: {data}."
    )


def why_listops(record: Record) -> str:
    settings = record["settings"]
    return (
        "**ListOps is trained with flashsdk alone, from one seed.** The model has 4 layers of "
        f"width 128 and learned positions, and reads {settings['examples']} expressions. "
        "A shorter training came before, and was tested on the same expressions: it is "
        "[below](#arena-listops-shorter)."
    )


def why_pathfinder(_: Record) -> str:
    return (
        "**Pathfinder, Path-X and Path-256 are not the paper's training, nor its images.** "
        "Images are drawn by a generator of this project, with the lengths and counts that the "
        "benchmark publishes. There is no end of them to train on, and others are kept for the "
        "test. Each size begins with easier images: shorter contours, and fewer that distract. "
        "Positions are rotary, for rows and columns. Half of the heads begin by looking at a place "
        "nearby. At 256 a tile sees its neighbours and some that are far. A model begins with the "
        "weights of the size before, but at 32. Its seconds are in its own row. The order is 32, "
        "64, 128, 256. This model is not the small one whose steps are timed."
    )


def why_cues(record: Record) -> str:
    best = record["result"].items()
    shown = ", ".join(f"{percent(value)} {name.removeprefix('best ')}" for name, value in best)
    return (
        "**Some labels of Pathfinder can be told without following a contour.** One threshold is "
        "set on where a dash beside a dot points, or on how far apart the dots are. The best "
        f"tells {shown}. These know which dot is on a start, which an image does not show. So a "
        "model can know less by them. In the published images such cues exist as well, as both "
        "contours start at a given distance there too. How much they tell there is not measured."
    )


def why_attention(record: Record) -> str:
    seconds: dict[tuple[str, int], dict[str, float]] = {}
    for row in record["rows"]:
        if row.get("both"):
            seconds.setdefault((row["name"], row["seqlen"]), {})[row["method"]] = row["both"]
    slower = {
        problem: of["flashsdk block-sparse"] / of["flashsdk"]
        for problem, of in seconds.items()
        if of.get("flashsdk block-sparse", 0) > of.get("flashsdk", math.inf)
    }
    if not slower:
        return ""
    (name, worst), most = max(slower.items(), key=lambda entry: entry[1])
    lengths = ", ".join(map(str, sorted({seqlen for _, seqlen in slower})))
    return (
        "**Block-sparse attention is not the fastest of all at every length.** The paper says it "
        f"is. At {lengths} some problem takes longer than dense, at most {times(most)} as long "
        f"({name}, {worst}). Short sequences have few blocks to leave out."
    )


def why_traffic(record: Record) -> str:
    apart = [
        f"{row['name']}, {row['method']}, {row['phase']}"
        for row in record["rows"]
        if abs((row["read"] + row["written"]) / row["dram"] - 1) > 0.15
    ]
    if not apart:
        return ""
    return (
        f"**Counts and counters of memory are more than 15 % apart in {len(apart)} of "
        f"{len(record['rows'])} rows** ({'; '.join(apart)}). [io.md](io.md) says why: the last "
        "bytes written stay in L2, and the softmax's derivative is two kernels in PyTorch. It also "
        "says where more is missing than that, in flashsdk's backward, and no cause is known."
    )


def why_tiles(record: Record) -> str:
    last = record["rows"][-1]
    best = min(record["rows"], key=lambda row: row["seconds"])
    if best is last:
        return ""
    return (
        f"**Larger tiles take less time up to {best['queries']} queries.** Tiles of "
        f"{last['queries']} read {times(best['received'] / last['received'])} fewer bytes from L2 "
        f"than those, and take {times(last['seconds'] / best['seconds'])} their time. Bytes are no "
        "longer what bounds them, and more warps wait for each other."
    )
