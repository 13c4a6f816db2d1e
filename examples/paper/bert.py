"""BERT-large, masked language modelling at 512 tokens: padded sequences beside packed ones.

The claim (FlashAttention, arXiv 2205.14135, table 1): BERT-large at sequence length 512 trains 15 %
faster than the training speed record of its day.

    python examples/paper/bert.py                              # on a GPU; --minutes N stops it
    python examples/paper/bert.py --smoke                      # a check: seconds on a CPU

Needs transformers and tokenizers: pip install '.[paper]'. Weights are random, the text is
that of text.py. A document is cut into sequences of at most 512 tokens, so that the last of each is
shorter, and short documents are short: that is the distribution of the lengths.

``documents``: the baselines pad every sequence of a batch to 512, with a mask; flashsdk's batches
have no padding, as sequences lie one behind the other (``varlen_attention``) until as many rows are
full. Speed is counted in tokens of text a second, padding left out. ``full``: every sequence has
512 tokens, and nothing is packed. All methods in turns, as they are and with each
layer compiled. What a run had no time for, the next one measures.
"""

from __future__ import annotations

import argparse

import common
import numpy as np
import text as texts
import torch
from common import Clock, Record, Row
from flashsdk.torch import attention, varlen_attention
from steps import (
    BACKENDS,
    METHODS,
    OURS,
    SHOWN,
    Inputs,
    Turns,
    padded_vocabulary,
    sdpa_method,
)
from text import VOCABULARIES, Corpus, corpus
from torch import Tensor, nn

MASK_TOKEN = 1  # of text.py's vocabulary
MASKED = 0.15
PROBLEMS = [(compiled, kind) for compiled in (False, True) for kind in ("documents", "full")]


def register() -> None:
    """Tells transformers of the methods that it does not have.

    By hand, so that what surrounds attention is the same for all of them. Models elsewhere take
    flashsdk.integrations.transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def ours(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **more):
        if "cu_seq_lens_q" not in more:  # sequences of one length
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            return attention(q, k, v, softmax_scale=scaling, dropout_p=dropout), None
        cu_seqlens, longest = more["cu_seq_lens_q"], more["max_length_q"]
        # (1, heads, tokens, head_dim) to (tokens, heads, head_dim).
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = varlen_attention(
            *(q, k, v, cu_seqlens, cu_seqlens, longest, longest),
            softmax_scale=scaling,
            dropout_p=dropout,
        )
        return out[None], None

    AttentionInterface.register(OURS, ours)
    for name, backend in BACKENDS.items():
        AttentionInterface.register(name, sdpa_method(backend, causal=False))
        AttentionMaskInterface.register(name, sdpa_mask)


def build(options: argparse.Namespace) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    layers, heads = (2, 2) if options.smoke else (24, 16)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=padded_vocabulary(options.vocabulary),
        hidden_size=64 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=256 * heads,
        max_position_embeddings=options.seqlen,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    with torch.device(options.device):  # where random weights take no time
        return BertForMaskedLM(config).train()


# ---- batches


def sequences(text: Corpus, seqlen: int, seed: int, *, full: bool) -> list[np.ndarray]:
    """Enough sequences for some batches, in an order drawn from the seed."""
    if full:
        whole = text.train[: len(text.train) // seqlen * seqlen].reshape(-1, seqlen)
        return list(whole[np.random.default_rng(seed).permutation(len(whole))[:4096]])
    ends = np.flatnonzero(text.train == 0) + 1
    starts = np.concatenate([[0], ends[:-1]])
    cut = [
        text.train[begin : min(begin + seqlen, end)]
        for start, end in zip(starts, ends)
        for begin in range(start, end, seqlen)
    ]
    order = np.random.default_rng(seed).permutation(len(cut))[:4096]
    return [cut[i] for i in order if len(cut[i]) > 1]


def hide(ids: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inputs with 15 % of the tokens masked, and labels, which are -100 elsewhere."""
    masked = rng.random(ids.shape) < MASKED
    masked.flat[0] = True  # a batch without any has no loss
    return np.where(masked, MASK_TOKEN, ids), np.where(masked, ids, -100)


def padded(found: list[np.ndarray], batch: int, seqlen: int, seed: int) -> tuple[Inputs, int]:
    """The next ``batch`` sequences, taken from the list, and how many tokens they have."""
    taken = [found.pop() for _ in range(batch)]
    ids = np.zeros((batch, seqlen), np.int64)
    real = np.zeros((batch, seqlen), bool)
    for row, sequence in enumerate(taken):
        ids[row, : len(sequence)] = sequence
        real[row, : len(sequence)] = True
    inputs, labels = hide(ids, np.random.default_rng(seed))
    labels[~real] = -100
    answer = {"input_ids": inputs, "labels": labels, "attention_mask": real.astype(np.int64)}
    return {name: torch.from_numpy(a) for name, a in answer.items()}, int(real.sum())


def packed(found: list[np.ndarray], batch: int, seqlen: int, seed: int) -> tuple[Inputs, int]:
    """As many tokens as ``batch`` full sequences have; the last sequence is cut where they end."""
    room = batch * seqlen
    taken: list[np.ndarray] = []
    while room:
        taken.append(found.pop()[:room])
        room -= len(taken[-1])
    inputs, labels = hide(np.concatenate(taken).astype(np.int64), np.random.default_rng(seed))
    places = np.concatenate([np.arange(len(sequence)) for sequence in taken])
    # Of one size for all batches, so that a compiled program fits: sequences of no tokens follow.
    most = 8 * batch
    if len(taken) > most:
        raise ValueError(f"{len(taken)} sequences in a batch; at most {most}")
    ends = np.cumsum([len(sequence) for sequence in taken])
    ends = np.concatenate([[0], ends, np.full(most - len(taken), batch * seqlen)])
    answer: Inputs = {
        "input_ids": torch.from_numpy(inputs)[None],
        "labels": torch.from_numpy(labels)[None],
        "position_ids": torch.from_numpy(places)[None],
        "cu_seq_lens_q": torch.from_numpy(ends.astype(np.int32)),
        "max_length_q": seqlen,
    }
    return answer, batch * seqlen


def shorten(batches: list[Inputs]) -> None:
    """Leaves out the sequences of no tokens that stand at the end of all batches."""
    ends = [inputs["cu_seq_lens_q"] for inputs in batches]
    most = max(int((e < e[-1]).sum()) for e in ends) + 1
    for inputs, e in zip(batches, ends):
        inputs["cu_seq_lens_q"] = e[:most]


def to(device: str, inputs: Inputs) -> Inputs:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}


# ---- measuring


def measure(
    options: argparse.Namespace,
    record: Record,
    clock: Clock,
    text: Corpus,
    kind: str,
    compiled: bool,
    methods: list[str],
) -> None:
    full = kind == "full"
    batches: dict[str, list[Inputs]] = {}
    tokens: dict[str, float] = {}
    drawn = sequences(text, options.seqlen, 0, full=full)
    for method in methods:
        found = list(drawn)
        make = packed if method == OURS and not full else padded
        made = [make(found, options.batch, options.seqlen, seed) for seed in range(4)]
        if full:
            # No padding, so that every backend may go without a mask.
            made = [({k: v for k, v in b.items() if k != "attention_mask"}, n) for b, n in made]
        elif make is packed:
            shorten([inputs for inputs, _ in made])
        batches[method] = [to(options.device, inputs) for inputs, _ in made]
        tokens[method] = sum(count for _, count in made) / len(made)
    times = {"warm": 1, "timed": 1} if options.smoke else {"timed": 4}
    turns = Turns(build(options), batches, compiled="layers" if compiled else None, **times)
    for method, row in turns.run(options.rounds, clock).items():
        if "error" not in row:
            row["tokens_a_second"] = tokens[method] / row["seconds"]
        record.row(
            kind=kind,
            compiled=compiled,
            method=SHOWN[method],
            batch=options.batch,
            tokens=tokens[method],
            **row,
        )
        shown = row.get("error")
        shown = shown or f"{row['seconds'] * 1e3:8.1f} ms {row['tokens_a_second']:10.0f} tokens/s"
        print(f"{kind:9} compiled: {compiled!s:6} {SHOWN[method]:15} {shown}")


def ratios(rows: list[Row]) -> list[Row]:
    """flashsdk's tokens a second over those of eager and of the best SDPA backend."""
    found: dict[tuple[str, bool], dict[str, float]] = {}
    for row in rows:
        if row.get("tokens_a_second"):
            key = (row["kind"], row["compiled"])
            found.setdefault(key, {})[row["method"]] = row["tokens_a_second"]
    answer = []
    for (kind, compiled), speeds in found.items():
        mine = speeds.get("flashsdk")
        best = max((s for name, s in speeds.items() if name.startswith("SDPA")), default=None)
        eager = speeds.get("eager")
        if mine:
            answer.append(
                {
                    "kind": kind,
                    "compiled": compiled,
                    "eager": round(mine / eager, 3) if eager else None,
                    "best_sdpa": round(mine / best, 3) if best else None,
                }
            )
    return answer


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--rounds", type=common.count, default=2, help="turns of all methods")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--no-compile", action="store_true")
    texts.arguments(parser, VOCABULARIES["bert"])
    options = parser.parse_args()
    if options.smoke:
        options.batch, options.seqlen, options.rounds = 2, 64, 1
        options.characters, options.vocabulary, options.no_compile = 200_000, 512, True
        options.methods = ["eager", "sdpa_pick", OURS]
    clock = Clock(options.minutes)
    out = common.folder(options.out, "bert", options.smoke)
    torch.set_float32_matmul_precision("high")
    register()
    text = corpus(
        options.text,
        characters=options.characters,
        vocabulary=options.vocabulary,
        smoke=options.smoke,
    )
    settings = {"seqlen": options.seqlen, "dropout": options.dropout, "text": text.digest}
    # Methods are compared of which a later run may have measured some.
    settings["vocabulary"] = padded_vocabulary(options.vocabulary)
    settings |= {"device": common.device_name(options.device), "batch": options.batch}
    record = Record.of(options, out, "bert", settings)
    done = {(row["kind"], row["compiled"], row["method"]) for row in record.rows}
    record.result.update(documents=len(text.lengths()), vocabulary=text.vocabulary)
    for compiled, kind in PROBLEMS:
        methods = [m for m in options.methods if (kind, compiled, SHOWN[m]) not in done]
        if not methods or (compiled and options.no_compile):
            continue
        if clock.over(reserve=0 if options.smoke else 10):
            print("stopped; run again to go on")
            break
        measure(options, record, clock, text, kind, compiled, methods)
        record.result.update(ratios=ratios(record.rows))
        record.save()
    record.save()


if __name__ == "__main__":
    common.entry(main)
