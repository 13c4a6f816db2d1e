"""GPT-2 of transformers, with each attention: tokens a second, memory, and the same loss.

The claim (FlashAttention, arXiv 2205.14135, table 2): GPT-2 small trains 3.5 times and medium 3
times faster than as Hugging Face shipped it, to the same perplexity.

    python examples/paper/gpt2.py speed                        # small and medium, 1K to 4K
    python examples/paper/gpt2.py speed --sizes medium --lengths 4096
    python examples/paper/gpt2.py train --steps 500            # equal steps, eager and flashsdk
    python examples/paper/gpt2.py speed --sizes small --lengths 1024 --compile whole
    python examples/paper/gpt2.py speed --compile graphs       # without the host's part
    python examples/paper/gpt2.py speed --smoke                # a check: seconds on a CPU

Needs transformers and tokenizers: pip install '.[paper]'. Weights are random, the text is
that of text.py, with a byte-level BPE of 50257 trained on it; every model has 50304 words, a
multiple of 64. bf16 autocast, AdamW (fused on a GPU), no dropout unless ``--dropout``.

``speed`` takes whole training steps of all methods in turns, with one model and one optimizer, as
they are and under torch.compile: each layer and the loss, or with ``--compile whole`` the model as
one program, which takes longer to compile. Where eager attention does not fit, it recomputes its
layers in the backward, and its row says so. With ``--compile graphs`` layers and loss are compiled,
and each whole step is captured as one CUDA graph, which the host starts with one call: the time of
the card alone. Such steps do not recompute. ``train`` takes the same steps from the same weights
with flashsdk, eager attention, and PyTorch's own choice. How far the last two come apart is what
rounding alone does to a training in bf16. Both go on where a run was stopped: ``speed`` with the
methods that had no turn yet, ``train`` with the next step, from exactly the saved state.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import common
import flashsdk as fs
import text as texts
import torch
from common import Clock, Record, Row, Training
from flashsdk.torch import attention
from steps import (
    BACKENDS,
    METHODS,
    OURS,
    SHOWN,
    Inputs,
    Turns,
    optimizer,
    padded_vocabulary,
    sdpa_method,
    train_step,
)
from text import VOCABULARIES, Corpus, corpus
from torch import Tensor, nn

CONTROL = "sdpa_pick"  # how far rounding alone takes a training from eager's
SIZES = {"small": (12, 12, 768), "medium": (24, 16, 1024)}  # layers, heads, width
BATCH = {"small": 16, "medium": 8}  # sequences of 1024 a step; longer ones as many tokens


# ---- attention


def register() -> None:
    """Tells transformers of the methods that it does not have.

    By hand, so that what surrounds attention is the same for all of them. Models elsewhere take
    flashsdk.integrations.transformers.
    """
    from transformers import AttentionInterface

    def ours(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
        if attention_mask is not None:
            raise ValueError("attention_mask: given; this program packs its sequences")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        mask = fs.Causal() if query.shape[2] > 1 else None
        return attention(q, k, v, mask=mask, softmax_scale=scaling, dropout_p=dropout), None

    AttentionInterface.register(OURS, ours)
    for name, backend in BACKENDS.items():
        AttentionInterface.register(name, sdpa_method(backend, causal=True))


# ---- model and step


def build(options: argparse.Namespace, size: str, context: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, heads, width = (2, 2, 64) if options.smoke else SIZES[size]
    torch.manual_seed(0)
    drop = options.dropout
    config = GPT2Config(
        vocab_size=padded_vocabulary(options.vocabulary),
        n_positions=context,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        resid_pdrop=drop,
        embd_pdrop=drop,
        attn_pdrop=drop,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "eager"
    with torch.device(options.device):  # where random weights take no time
        model = GPT2LMHeadModel(config)
    # transformers finds no loss by this class's name, and logs it, at which torch.compile stops.
    model.loss_type = "ForCausalLM"
    return model.train()


def tokens(text: Corpus, batch: int, seqlen: int, seed: int, device: str) -> Inputs:
    """Inputs of one step; transformers shifts the labels itself."""
    ids = text.batch(batch, seqlen, seed).to(device)
    return {"input_ids": ids, "labels": ids}


def masked(batches: list[Inputs]) -> list[Inputs]:
    """With the mask of eager attention, one for all.

    transformers makes it anew in each step, and copies a number from the host for it. Such a copy
    cannot be captured in a CUDA graph.
    """
    ids = batches[0]["input_ids"]
    seqlen = ids.shape[1]
    lowest = torch.full((seqlen, seqlen), torch.finfo(torch.float32).min, device=ids.device)
    mask = lowest.triu(1)[None, None]
    return [{**inputs, "attention_mask": mask} for inputs in batches]


# ---- speed


def speed(options: argparse.Namespace, clock: Clock, record: Record, text: Corpus) -> None:
    done = {(row["size"], row["seqlen"], row["compiled"], row["method"]) for row in record.rows}
    problems = [
        (size, seqlen, compiled, methods)
        for size in options.sizes
        for seqlen in options.lengths
        for compiled in ((False,) if options.compile == "no" else (False, True))
        if (
            methods := [
                method
                for method in options.methods
                if (size, seqlen, compiled, SHOWN[method]) not in done
            ]
        )
    ]
    for number, (size, seqlen, compiled, methods) in enumerate(problems):
        if clock.over(reserve=0 if options.smoke else 10):
            print(f"stopped with {len(problems) - number} problems to go; run again to go on")
            break
        common.progress(number / len(problems), f"GPT-2 {size}, {seqlen}, compiled: {compiled}")
        batch = 2 if options.smoke else max(1, BATCH[size] * 1024 // seqlen)
        inputs = [tokens(text, batch, seqlen, seed, options.device) for seed in range(4)]
        batches = {method: inputs for method in methods}
        if compiled and options.compile == "graphs" and "eager" in methods:
            batches["eager"] = masked(inputs)
        turns = Turns(
            build(options, size, seqlen),
            batches,
            compiled=options.compile if compiled else None,
            **({"warm": 1, "timed": 1} if options.smoke else {}),
        )
        for method, row in turns.run(options.rounds, clock).items():
            if "error" not in row:
                row["tokens_a_second"] = batch * seqlen / row["seconds"]
            record.row(
                size=size,
                seqlen=seqlen,
                compiled=compiled,
                method=SHOWN[method],
                batch=batch,
                **row,
            )
            shown = row.get("error") or f"{row['seconds'] * 1e3:.1f} ms a step"
            print(f"{size:7} {seqlen:5} compiled: {compiled!s:6} {SHOWN[method]:15} {shown}")
        record.result.update(ratios=ratios(record.rows))
        record.save()
        del turns


def ratios(rows: list[Row]) -> list[Row]:
    """How many times faster flashsdk is than eager as shipped, eager alike, and the best SDPA."""
    found: dict[tuple[str, int, bool], dict[str, float]] = {}
    for row in rows:
        if row.get("seconds"):
            key = (row["size"], row["seqlen"], row["compiled"])
            found.setdefault(key, {})[row["method"]] = row["seconds"]
    answer = []
    for (size, seqlen, compiled), times in found.items():
        mine = times.get("flashsdk")
        if not mine:
            continue
        shipped = found.get((size, seqlen, False), {}).get("eager")
        sdpa = [seconds for method, seconds in times.items() if method.startswith("SDPA")]
        entry: Row = {"size": size, "seqlen": seqlen, "compiled": compiled}
        for name, other in (
            ("eager_as_shipped", shipped),
            ("eager", times.get("eager")),
            ("best_sdpa", min(sdpa, default=None)),
        ):
            entry[name] = round(other / mine, 3) if other else None
        answer.append(entry)
    return answer


# ---- equal steps


def train(options: argparse.Namespace, clock: Clock, record: Record, text: Corpus) -> None:
    size, seqlen = options.sizes[0], options.lengths[0]
    batch = 2 if options.smoke else max(1, BATCH[size] * 1024 // seqlen)
    out = record.path.parent
    # The faster first: steps of two are compared as they come.
    for method in (OURS, "eager", CONTROL):
        model = build(options, size, seqlen)
        model.config._attn_implementation = method
        training = Training(out / f"{method}.pt", model, optimizer(model, options.rate), {})

        def step(state: Row, training: Training = training) -> dict[str, Tensor]:
            number = state["step"]
            torch.manual_seed(number)  # of dropout
            warm = min(1.0, (number + 1) / 100)
            left = 0.5 * (1 + math.cos(math.pi * number / options.steps))
            training.learning_rate(options.rate * warm * (0.1 + 0.9 * left))
            inputs = tokens(text, batch, seqlen, number, options.device)
            loss = train_step(training.model, training.model, training.optimizer, inputs)
            record.row(method=SHOWN[method], step=number, loss=loss.item())  # noqa: B023
            return {"loss": loss}

        # Rows of steps behind the last checkpoint will come again.
        at = training.state["step"]
        record.rows[:] = [
            row for row in record.rows if row["method"] != SHOWN[method] or row["step"] < at
        ]
        training.run(
            step,
            record,
            clock,
            until=lambda state: state["step"] >= options.steps,
            show=lambda state, means: f"{method}  step {state['step']}  loss {means['loss']:.4f}",  # noqa: B023
            share=lambda state: state["step"] / options.steps,
            device=options.device,
            every=1.0 if options.smoke else 5.0,
        )
        del model, training
        if clock.over():
            break
    curves: dict[str, list[float]] = {}
    for row in record.rows:
        curves.setdefault(row["method"], []).append(row["loss"])
    for name, method in (("apart", OURS), ("control", CONTROL)):
        pairs = list(zip(curves.get(SHOWN[method], []), curves.get("eager", [])))
        if not pairs:
            continue
        apart = max(abs(loss - eager) / eager for loss, eager in pairs)
        mean = sum(loss - eager for loss, eager in pairs) / sum(eager for _, eager in pairs)
        record.result.update({"size": size, "seqlen": seqlen, "steps": len(pairs)})
        record.result.update({name: apart, f"{name}_mean": mean})
        print(
            f"{SHOWN[method]} and eager, {len(pairs)} equal steps: losses at most {apart:.3%} "
            f"apart, {mean:+.3%} in the mean"
        )
    record.save()
    common.plot(
        out / "loss.png",
        {method: (range(1, len(losses) + 1), losses) for method, losses in curves.items()},
        title=f"GPT-2 {size}, {seqlen} tokens, the same steps",
        x="step",
        y="nats a token",
    )


def picture(rows: list[Row], path: Path) -> None:
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row.get("tokens_a_second"):
            name = f"{row['size']}, {row['method']}{', compiled' if row['compiled'] else ''}"
            xs, ys = lines.setdefault(name, ([], []))
            xs.append(row["seqlen"])
            ys.append(row["tokens_a_second"])
    common.plot(
        path, lines, title="GPT-2, training", x="sequence length", y="tokens a second", log="x"
    )


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("what", choices=("speed", "train"))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument(
        "--compile",
        choices=("layers", "graphs", "whole", "no"),
        default="layers",
        help="what is compiled",
    )
    parser.add_argument("--rounds", type=common.count, default=3, help="turns of all methods")
    parser.add_argument("--steps", type=int, default=500, help="of train")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate of train")
    parser.add_argument("--dropout", type=float, default=0.0)
    texts.arguments(parser, VOCABULARIES["gpt2"])
    options = parser.parse_args()
    if options.smoke:
        options.sizes, options.lengths, options.rounds, options.steps = ["small"], [64], 1, 4
        options.characters, options.vocabulary, options.compile = 200_000, 512, "no"
        options.methods = ["eager", "sdpa_pick", OURS]
    name = f"gpt2-{options.what}"
    if options.what == "speed" and options.compile in ("graphs", "whole"):
        name += f"-{options.compile}"
        if options.compile == "graphs" and torch.device(options.device).type != "cuda":
            sys.exit(f"--compile graphs: needs a GPU, --device is {options.device}")
    clock = Clock(options.minutes)
    out = common.folder(options.out, name, options.smoke)
    torch.set_float32_matmul_precision("high")
    register()
    text = corpus(
        options.text,
        characters=options.characters,
        vocabulary=options.vocabulary,
        smoke=options.smoke,
    )
    settings = {"what": options.what, "dropout": options.dropout, "text": text.digest}
    settings["vocabulary"] = padded_vocabulary(options.vocabulary)
    if options.what == "speed":
        # Methods are compared of which a later run may have measured some.
        settings |= {"device": common.device_name(options.device), "compile": options.compile}
    else:
        settings |= {"size": options.sizes[0], "seqlen": options.lengths[0]}
        settings |= {"steps": options.steps, "rate": options.rate}
    record = Record.of(options, out, "gpt2", settings)
    {"speed": speed, "train": train}[options.what](options, clock, record, text)
    record.save()
    if options.what == "speed":
        picture(record.rows, out / "speed.png")


if __name__ == "__main__":
    common.entry(main)
