"""A training step of a Llama of transformers by our attention and by sdpa, in turns.

    python benchmarks/transformers_step.py [--device cpu|cuda] [--record FILE.json]

Forward, loss, backward and AdamW, of one model whose attention is switched between steps, so that
both meet the same parameters, clocks and load. Their order is drawn anew every round. With padding
one row of the batch has half of the tokens, and the rest of it is padding on the right. Of each the
median of all rounds is given, and the 10th and the 90th percentile; "ratio" is of the rounds' own
ratios, above 1 where ours is faster.

``--threads 1 --clock cpu`` is for a CPU that has other work: the time that one thread ran. A record
in benchmarks/results/ is put into docs/dev/benchmarks.md by benchmarks/render.py.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

import flashsdk as fs
from flashsdk._commands import machine
from flashsdk._commands.table import markdown_table

KIND = "transformers"
# (batch, padded) of the steps that are timed.
STEPS = ((1, False), (2, True))
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers
    from flashsdk.integrations import transformers as door

    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    names, clock = {"ours": door.register(), "sdpa": "sdpa"}, CLOCKS[given.clock]
    if given.threads is not None:
        torch.set_num_threads(given.threads)
        fs.set_num_threads(given.threads)
    record = machine.record_header(KIND)  # now, as sources may change while this runs
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=given.vocabulary,
        hidden_size=given.hidden,
        intermediate_size=given.hidden * 11 // 4,
        num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // given.head_dim,
        num_key_value_heads=given.hidden // given.head_dim,
        max_position_embeddings=given.seqlen,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).to(device, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(name: str, inputs: dict[str, Any]) -> float:
        model.set_attn_implementation(names[name])
        settle()
        begin = clock()
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        settle()
        taken = clock() - begin
        if not torch.isfinite(loss):
            raise SystemExit(f"{name}: the loss is {loss}")
        return taken

    orders, rows = random.Random(0), []
    for batch, padded in STEPS:
        tokens = torch.randint(given.vocabulary, (batch, given.seqlen), device=device)
        inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
        lengths = [given.seqlen] * batch
        if padded:
            lengths = [given.seqlen * (n + 1) // batch for n in range(batch)]
            mask = torch.arange(given.seqlen) < torch.tensor(lengths)[:, None]
            inputs["attention_mask"] = mask.to(device, torch.long)
            inputs["labels"] = tokens.masked_fill(~mask.to(device), -100)
        times: dict[str, list[float]] = {name: [] for name in names}
        for n in range(given.rounds + given.warmups):
            for name in orders.sample(list(names), len(names)):
                taken = step(name, inputs)
                if n >= given.warmups:
                    times[name].append(taken)
            print(f"batch {batch}, padded {padded}: round {n + 1}", file=sys.stderr)
        rows.append({"batch": batch, "padded": padded, "lengths": lengths, "seconds": times})
    record["versions"]["transformers"] = transformers.__version__
    record["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    shape = ("clock", "layers", "hidden", "head_dim", "vocabulary", "seqlen", "dtype")
    return record | {name: getattr(given, name) for name in shape} | {"rows": rows}


def table(record: dict[str, Any]) -> str:
    rows = []
    for row in record["rows"]:
        ours, sdpa = row["seconds"]["ours"], row["seconds"]["sdpa"]
        tokens = f"{row['batch']} × {record['seqlen']}"
        tokens += f", {sum(row['lengths'])} without padding" if row["padded"] else ""
        cells = [spread([1e3 * t for t in times], ".0f") for times in (ours, sdpa)]
        ratios = [b / a for a, b in zip(ours, sdpa, strict=True)]
        rows.append([tokens, *cells, spread(ratios, ".2f")])
    return markdown_table(["tokens", "ours, ms", "sdpa, ms", "ratio"], rows)


def spread(samples: list[float], form: str) -> str:
    low, *_, high = statistics.quantiles(samples, n=10, method="inclusive")
    return f"{statistics.median(samples):{form}} ({low:{form}} to {high:{form}})"


def section(record: dict[str, Any], about: str) -> str:
    """Of docs/dev/benchmarks.md."""
    where = record["device"]
    if where == "cpu":
        threads = record["threads"]
        where = f"{record['cpu']}, {record['isa']}, {threads} thread" + "s" * (threads > 1)
    clock = {
        "wall": "Times are of the wall",
        "cpu": "The machine had other work: times are those that the process ran",
    }
    what = (
        f"A training step (forward, loss, backward, AdamW) of a Llama of {record['layers']} "
        f"layers, {record['hidden']} wide, heads of {record['head_dim']}, {record['dtype']}: our "
        f"attention and sdpa in turns (`benchmarks/transformers_step.py`). "
        f"{clock[record['clock']]}, medians and from the 10th to the 90th percentile; the ratio "
        f"is sdpa's time over ours in the same round."
    )
    return "\n\n".join([f"## A Llama of transformers: {where}", about, what, table(record)])


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", default=None, help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=None, help="2048 on a GPU, 512 on a CPU")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--seqlen", type=int, default=None, help="4096 on a GPU, 1024 on a CPU")
    parser.add_argument("--threads", type=int, default=None, help="as many as both take")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--record", type=Path, default=None, help="where to write it as JSON")
    given = parser.parse_args()
    cuda = torch.device(given.device).type == "cuda"
    given.dtype = given.dtype or ("bfloat16" if cuda else "float32")
    given.hidden = given.hidden or (2048 if cuda else 512)
    given.seqlen = given.seqlen or (4096 if cuda else 1024)
    record = measure(given)
    print(table(record))
    if given.record is not None:
        given.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
