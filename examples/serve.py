"""Serves a language model of transformers: continuous batching over a paged cache.

    python examples/serve.py                                    # a small Llama of random weights
    python examples/serve.py --model PATH_OR_NAME --prompts FILE      # a text a line, continued
    python examples/serve.py --check          # and each request alone, which gives the same tokens

Requests arrive over time. A step of the server computes one token of each sequence that is being
written and, with what is left of its budget, parts of new prompts. What that takes, in order:

- ``attend`` is the attention of each layer: ``flashsdk.torch.kv_append`` writes new keys into
  pages, ``flashsdk.torch.attention`` reads them by a table of each sequence's pages.
- ``PagedModel`` has the pages, and runs the model for the tokens of a step. A step of one token
  each is a ``Decoder``, on a GPU a CUDA graph.
- ``Pages`` knows which pages are free, and which hold beginnings of prompts that others share.
- ``Server`` decides what is in a step.

Prompts are always cut at the same places. With --check the bits of a token then depend on its own
sequence alone: keys are not split (``num_splits=1``), and all steps are filled up to as many rows,
as PyTorch's matrix products may round in another way for fewer.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import flashsdk as fs
import torch
import torch.nn.functional as F
import transformers
from flashsdk.torch import attention, kv_append
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

NAME = "paged_fsdk"  # of ``attend`` among transformers' attention functions
LOOK = f"{NAME}_look"  # of ``look``; models that are served meanwhile keep ``attend``
REQUESTS, RATE, NEW_TOKENS = 24, 10.0, 64  # where the options do not say
NOBODYS = 0  # the page that rows without a sequence write to


# ---- attention


class Part(NamedTuple):
    """Sequences of a step that have equally many new tokens, one sequence after the other."""

    rows: slice  # of all tokens of the step
    used: Tensor  # int32 (batch,): how many keys of each lie in its pages already
    table: Tensor  # int32 (batch, max_pages): its pages


class Step(NamedTuple):
    """What the attention of every layer has to know; the model hands it on."""

    parts: list[Part]
    cache: list[tuple[Tensor, Tensor]]  # of each layer, (pages, page_size, num_heads_kv, head_dim)
    num_splits: int | None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    step: Step, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """A function of AttentionInterface: query (1, num_heads, tokens, head_dim), rotated."""
    k_pages, v_pages = step.cache[module.layer_idx]
    # A window counts the query's own place, a mask the keys before it.
    mask = fs.Causal() if sliding_window is None else fs.SlidingWindow(sliding_window - 1)
    # Rows behind the last part fill the step up: nobody reads them.
    out = query.new_zeros(query.shape[2], query.shape[1], value.shape[3])
    for part in step.parts:
        q, k, v = (  # (batch, new tokens, heads, head_dim)
            x[0, :, part.rows].transpose(0, 1).unflatten(0, (len(part.used), -1))
            for x in (query, key, value)
        )
        kv_append(k_pages, v_pages, k, v, part.used, block_table=part.table)
        attended = attention(
            q,
            k_pages,
            v_pages,
            mask=mask,
            seqused_k=part.used + k.shape[1],
            block_table=part.table,
            softmax_scale=scaling,
            softcap=softcap or 0.0,
            sink=None if s_aux is None else s_aux.float(),
            num_splits=step.num_splits,
        )
        out[part.rows] = attended.flatten(0, 1)
    return out[None], None


# ---- the model


@torch.no_grad()
def layers_of(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """A key and a value of each layer, (1, num_heads_kv, 1, head_dim), by a run of one token.

    A ValueError where ``attend`` would not see all of a layer's attention: the tokens would be
    others than the model's, and nothing would say so.
    """
    seen: list[tuple[int | None, Tensor, Tensor, int | None]] = []

    def look(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None, *, step: object = None, sliding_window: int | None = None,
        is_causal: bool | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if is_causal is None:  # the keyword comes first in transformers' own functions too
            is_causal = getattr(module, "is_causal", True)
        # ``attend`` needs the step, sees no mask, and no keys behind a query.
        if step is seen and attention_mask is None and is_causal:
            seen.append((getattr(module, "layer_idx", None), key, value, sliding_window))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    name, config = type(model).__name__, model.config
    configs = {"": config} | {x: getattr(config, x, None) for x in config.sub_configs}
    own = {x: y._attn_implementation for x, y in configs.items() if y is not None}
    AttentionInterface().register(LOOK, look)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        model.set_attn_implementation(LOOK)
        model(input_ids=token, position_ids=token, use_cache=False, step=seen)
    except Exception as e:
        line = str(e).partition("\n")[0]
        raise ValueError(f"{name}: a run of one token: {type(e).__name__}: {line}") from e
    finally:
        model.set_attn_implementation(own)

    config = config.get_text_config()
    count = config.num_hidden_layers
    one = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = getattr(config, "layer_types", None) or [one] * count
    if others := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{name}: {min(others)}; full_attention and sliding_attention")
    if [layer for layer, *_ in seen] != list(range(count)):
        wanted = "one call of AttentionInterface a layer, causal and without a mask of its own"
        raise ValueError(f"{name}: not {wanted}")
    if any(kinds[n] == "sliding_attention" and x[3] is None for n, x in enumerate(seen)):
        raise ValueError(f"{name}: a window that only its mask has; sliding_window for attend")
    return [(key, value) for _, key, value, _ in seen]


class PagedModel:
    """A model whose keys and values lie in pages."""

    def __init__(
        self,
        model: nn.Module,
        *,
        pages: int,
        page_size: int,
        max_pages: int,  # of a sequence
        max_batch: int,
        rows: int = 0,  # to which all steps are filled up, for bits that depend on nothing else
    ):
        self.model, self.device = model, model.device
        self.pages, self.page_size, self.max_pages = pages, page_size, max_pages
        self.rows, self.num_splits = rows, 1 if rows else None
        self.cache = [
            (
                key.new_empty(pages, page_size, key.shape[1], key.shape[3]),
                value.new_empty(pages, page_size, value.shape[1], value.shape[3]),
            )
            for key, value in layers_of(model)
        ]
        AttentionInterface().register(NAME, attend)
        model.set_attn_implementation(NAME)
        sizes = {min(2**n, max_batch) for n in range(max_batch.bit_length() + 1)}
        self.decoders = [Decoder(self, size) for size in sorted(sizes)]

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, parts: list[Part], last: Tensor) -> Tensor:
        """The tokens that follow those at the rows ``last``; all are int64, of one dimension."""
        missing = max(self.rows - len(tokens), 0)
        tokens, positions = (F.pad(x, (0, missing))[None] for x in (tokens, positions))
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=0 if self.rows else last,  # 0 keeps all
            step=Step(parts, self.cache, self.num_splits),
        ).logits[0]
        return (logits[last] if self.rows else logits).argmax(-1)

    def decode(self, tokens: list[int], used: list[int], tables: list[Tensor]) -> list[int]:
        """The next token of sequences that have one new token each."""
        decoder = next(x for x in self.decoders if x.size >= len(tokens))
        return decoder(tokens, used, tables)


class Decoder:
    """A step of one token each of up to ``size`` sequences, in tensors that stay where they are.

    So a GPU can replay it: lengths and tables are read by the kernels, and one graph serves every
    step. Rows that have no sequence write to a page that nobody reads.
    """

    def __init__(self, model: PagedModel, size: int):
        self.model, self.size = model, size
        new = {"device": model.device, "dtype": torch.int32}
        self.tokens = torch.zeros(size, device=model.device, dtype=torch.int64)
        self.used = torch.zeros(size, **new)
        self.table = torch.full((size, model.max_pages), NOBODYS, **new)
        self.last = torch.arange(size, device=model.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if model.device.type == "cuda":
            self.capture()

    def run(self) -> Tensor:
        part = Part(slice(0, self.size), self.used, self.table)
        return self.model.forward(self.tokens, self.used.long(), [part], self.last)

    def capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once before, so that libraries are set up
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.next = self.run()

    def __call__(self, tokens: list[int], used: list[int], tables: list[Tensor]) -> list[int]:
        count = len(tokens)
        self.tokens[:count] = torch.tensor(tokens)
        self.used[:count] = torch.tensor(used, dtype=torch.int32)
        self.table[:count] = torch.stack(tables)
        self.used[count:] = 0
        self.table[count:] = NOBODYS
        if self.graph is None:
            self.next = self.run()
        else:
            self.graph.replay()
        return self.next[:count].tolist()


# ---- pages


class Pages:
    """Which pages are free; and which hold beginnings of prompts, for others to share.

    A prompt is computed in chunks, and shared in chunks. So what a token's bits come from is the
    same wherever its chunk was computed.
    """

    def __init__(self, count: int, size: int, chunk: int):
        self.size, self.chunk = size, chunk
        self.free = [page for page in range(count) if page != NOBODYS]
        self.users: Counter[int] = Counter()  # of each page
        self.begun: dict[tuple[int, ...], list[int]] = {}  # tokens up to a chunk's end: its pages
        self.shared = 0  # tokens that were not computed again

    def take(self, tokens: list[int], most: int) -> tuple[list[int], int] | None:
        """Pages for a sequence that begins with ``tokens`` and has ``most`` at its end.

        Also how many of the tokens lie there already. None while too few pages are free.
        """
        pages: list[int] = []
        for end in range(self.chunk, len(tokens), self.chunk):  # the last token's logits are wanted
            found = self.begun.get(tuple(tokens[:end]))
            if found is None:
                break
            pages += found
        ready, missing = len(pages) * self.size, -(-most // self.size) - len(pages)
        if missing > len(self.free):
            return None
        pages += [self.free.pop() for _ in range(missing)]
        self.users.update(pages)
        self.shared += ready
        return pages, ready

    def share(self, tokens: list[int], pages: list[int]) -> None:
        """Lets others begin with these tokens, whose keys now lie in the pages."""
        for end in range(self.chunk, len(tokens) + 1, self.chunk):
            of_chunk = pages[(end - self.chunk) // self.size : end // self.size]
            self.begun.setdefault(tuple(tokens[:end]), of_chunk)

    def give_back(self, pages: list[int]) -> None:
        self.users.subtract(pages)
        unused = {page for page in pages if not self.users[page]}
        self.begun = {x: held for x, held in self.begun.items() if unused.isdisjoint(held)}
        self.free += unused


# ---- the server


@dataclass
class Request:
    prompt: list[int]
    max_new_tokens: int
    arrival: float = 0.0  # seconds after the start


@dataclass
class Sequence:
    """A request that is being worked on."""

    request: Request
    pages: list[int]
    table: Tensor  # the pages, int32 (max_pages,)
    used: int  # tokens whose keys and values lie in them
    tokens: list[int]  # the prompt, and what was written
    first: float = 0.0  # when its first new token was there, by time.perf_counter

    @property
    def new(self) -> int:
        """Tokens that the model has not seen yet."""
        return len(self.tokens) - self.used

    @property
    def written(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]


Group: TypeAlias = tuple[list[Sequence], int]  # and how many new tokens of each are in a step


@dataclass
class Server:
    """Steps of at most ``max_tokens`` tokens, of at most ``max_batch`` sequences.

    Both may be as large as memory allows; ``max_tokens`` is at least ``max_batch + chunk``.
    """

    model: PagedModel
    max_batch: int
    max_tokens: int
    chunk: int  # tokens of a prompt in a step, a multiple of the page size
    share: bool
    ends: set[int] = field(default_factory=set)  # tokens that end a text
    steps: int = 0

    def __post_init__(self) -> None:
        self.pages = Pages(self.model.pages, self.model.page_size, self.chunk)
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def admit(self) -> None:
        """In the order of arrival, as long as there are pages for all that may be written."""
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            most = len(request.prompt) + request.max_new_tokens
            taken = self.pages.take(request.prompt, most)
            if taken is None:
                return
            pages, found = taken
            table = torch.full((self.model.max_pages,), NOBODYS, dtype=torch.int32)
            table[: len(pages)] = torch.tensor(pages)
            self.running.append(Sequence(request, pages, table, found, list(request.prompt)))
            self.waiting.popleft()

    def step(self) -> list[Sequence]:
        """Computes a step; returns the sequences that are finished."""
        self.admit()
        one = [x for x in self.running if x.new == 1]
        if len(one) == len(self.running):
            groups = [(one, 1)]
            new = self.model.decode(
                [x.tokens[-1] for x in one], [x.used for x in one], [x.table for x in one]
            )
        else:
            groups = [(one, 1)] * bool(one) + self.chunks(self.max_tokens - len(one))
            new = self.mixed(groups)
        self.steps += 1
        return self.advance(groups, new)

    def chunks(self, room: int) -> list[Group]:
        """The next chunks of prompts for which there is room."""
        groups: list[Group] = []
        for x in self.running:
            count = min(x.new, self.chunk)
            if 1 < count <= room:
                groups.append(([x], count))
                room -= count
        return groups

    def mixed(self, groups: list[Group]) -> list[int]:
        """The next token of those sequences that have no new ones left, in their order."""
        device, parts, begin = self.model.device, [], 0
        tokens, positions, last = [], [], []
        for group, count in groups:
            end = begin + count * len(group)
            used = torch.tensor([x.used for x in group], dtype=torch.int32, device=device)
            table = torch.stack([x.table for x in group]).to(device)
            parts.append(Part(slice(begin, end), used, table))
            begin = end
            for x in group:
                tokens += x.tokens[x.used : x.used + count]
                positions += range(x.used, x.used + count)
                if count == x.new:
                    last.append(len(tokens) - 1)
        given = (torch.tensor(x, dtype=torch.int64, device=device) for x in (tokens, positions))
        of_last = torch.tensor(last, dtype=torch.int64, device=device)
        return self.model.forward(*given, parts, of_last).tolist()

    def advance(self, groups: list[Group], new: list[int]) -> list[Sequence]:
        tokens, now, finished = iter(new), time.perf_counter(), []
        for x, count in ((x, count) for group, count in groups for x in group):
            x.used += count
            if x.new:  # its prompt has more chunks
                continue
            if not x.written:
                x.first = now
                if self.share:
                    self.pages.share(x.tokens, x.pages)
            x.tokens.append(next(tokens))
            if len(x.written) == x.request.max_new_tokens or x.tokens[-1] in self.ends:
                self.pages.give_back(x.pages)
                self.running.remove(x)
                finished.append(x)
        return finished


def serve(server: Server, requests: Iterable[Request], show: bool = True) -> list[Sequence]:
    """Hands the requests over as they arrive; returns their sequences as they are finished.

    ``first`` of each becomes the time to its first token, seconds.
    """
    coming = deque(sorted(requests, key=lambda x: x.arrival))
    total, done = len(coming), []
    started = time.perf_counter()
    while coming or server.busy:
        now = time.perf_counter() - started
        while coming and coming[0].arrival <= now:
            server.waiting.append(coming.popleft())
        if not server.busy:
            time.sleep(coming[0].arrival - now)
            continue
        done += server.step()
        if show:
            text = f"{len(done)} of {total} requests, {len(server.running)} at work"
            show_progress(len(done) / total, f"{text}, {len(server.waiting)} waiting")
    for x in done:
        x.first -= started + x.request.arrival
    return done


def show_progress(share: float, text: str) -> None:
    filled = round(24 * share)
    line = f"{'█' * filled}{'░' * (24 - filled)}  {text}"
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="\n" if share >= 1 else "", file=sys.stderr, flush=True)
    elif share >= 1:
        print(line, file=sys.stderr, flush=True)


# ---- what is served, and what came out


def small_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def random_requests(count: int, rate: float, vocabulary: int) -> list[Request]:
    """Prompts of 8 to 160 tokens, of which half begin alike; ``rate`` of them come in a second."""
    draw = random.Random(0)
    beginning = [draw.randrange(vocabulary) for _ in range(64)]
    requests, arrival = [], 0.0
    for n in range(count):
        own = [draw.randrange(vocabulary) for _ in range(draw.randint(8, 96))]
        prompt = (beginning if n % 2 else []) + own
        requests.append(Request(prompt, draw.randint(8, 64), arrival))
        arrival += draw.expovariate(rate)
    return requests


def report(done: list[Sequence], server: Server, seconds: float) -> None:
    written = sum(len(x.written) for x in done)
    first = sorted(1e3 * x.first for x in done)
    tokens = sum(x.used for x in done) - server.pages.shared
    rows = (
        ("new tokens", f"{written}"),
        ("new tokens a second", f"{written / seconds:.0f}"),
        ("time to first token, ms", f"{statistics.median(first):.0f}, at most {first[-1]:.0f}"),
        ("steps", f"{server.steps}, of {tokens / server.steps:.1f} tokens on average"),
        ("prompt tokens shared", f"{server.pages.shared}"),
    )
    for name, value in rows:
        print(f"{name:25}{value}")


def check(done: list[Sequence], server: Server) -> int:
    """How many requests have other tokens than each alone has."""
    wrong = 0
    for n, x in enumerate(done):
        only = replace(server, steps=0)  # with pages of its own
        (alone,) = serve(only, [replace(x.request, arrival=0.0)], show=False)
        if x.written != alone.written:
            wrong += 1
            prompt = f"a prompt of {len(x.request.prompt)} tokens"
            print(f"{prompt}: {x.written}, alone {alone.written}")
        show_progress((n + 1) / len(done), f"{n + 1} of {len(done)} alone")
    print(f"{len(done) - wrong} of {len(done)} requests have the tokens that each has alone")
    return wrong


def positive_int(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; 1 or more")
    return int(text)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="a folder or a name of transformers; else a small Llama of random weights")
    add("--prompts", type=Path, help="a file, a prompt a line; else random tokens")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="float32, on a GPU bfloat16")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    add("--requests", type=positive_int, help=f"how many, of random ones ({REQUESTS})")
    add("--rate", type=float, help=f"of these, a second ({RATE})")
    add("--max-new-tokens", type=positive_int, help=f"of each of a file's prompts ({NEW_TOKENS})")
    add("--max-batch", type=positive_int, default=16, help="sequences of a step (%(default)s)")
    add("--max-tokens", type=positive_int, default=64, help="tokens of a step (%(default)s)")
    add("--chunk", type=positive_int, default=32, help="tokens of a prompt in a step (%(default)s)")
    add("--page-size", type=positive_int, default=16, help="keys of a page (%(default)s)")
    add("--pages", type=positive_int, help="of the cache; else as many as a full batch may need")
    add("--no-sharing", action="store_true", help="compute equal beginnings each time")
    add("--check", action="store_true", help="compare with each request alone; slower steps")
    args = parser.parse_args(arguments)
    if args.max_tokens < args.max_batch + args.chunk:
        parser.error("--max-tokens is less than --max-batch and --chunk together")
    if args.chunk % args.page_size:
        parser.error("--chunk is no multiple of --page-size")
    if args.rate is not None and not args.rate > 0:  # nan too
        parser.error("--rate is not above 0")
    if args.prompts and not args.model:
        parser.error("--prompts needs --model, whose words they are")
    if args.prompts and (args.requests or args.rate):
        parser.error("--requests and --rate are of random requests, not of --prompts")
    if args.max_new_tokens and not args.prompts:
        parser.error("--max-new-tokens is for --prompts; random requests draw how many they want")
    if args.prompts and not args.prompts.is_file():
        parser.error(f"--prompts: {args.prompts} is no file")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parsed(arguments)
    if args.model is None:
        model = small_llama()
    else:
        # No model there, none that transformers knows, or one without words.
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(args.model)
            if args.prompts:
                tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        except (OSError, ValueError) as e:
            sys.exit(f"--model: {args.model}: {(str(e).splitlines() or ['not read'])[0]}")
    dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    model = model.to(args.device, getattr(torch, dtype)).eval()
    if args.prompts:
        lines = args.prompts.read_text("utf-8").splitlines()
        prompts = [tokenizer(line).input_ids for line in lines if line.strip()]
        requests = [Request(prompt, args.max_new_tokens or NEW_TOKENS) for prompt in prompts]
        if not requests:
            sys.exit(f"--prompts: {args.prompts} has none")
    else:
        vocabulary = model.config.get_text_config().vocab_size
        requests = random_requests(args.requests or REQUESTS, args.rate or RATE, vocabulary)

    longest = max(len(x.prompt) + x.max_new_tokens for x in requests)
    max_pages = -(-longest // args.page_size)
    pages = args.pages or 1 + args.max_batch * max_pages
    if pages <= max_pages:
        sys.exit(f"--pages: {pages}; more than {max_pages}, which one request may need")
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    try:
        paged = PagedModel(
            model,
            pages=pages,
            page_size=args.page_size,
            max_pages=max_pages,
            max_batch=args.max_batch,
            rows=args.max_tokens if args.check else 0,
        )
    except ValueError as e:
        sys.exit(f"--model: {e}")
    server = Server(paged, args.max_batch, args.max_tokens, args.chunk, not args.no_sharing, ends)

    started = time.perf_counter()
    done = serve(server, requests)
    report(done, server, time.perf_counter() - started)
    if args.prompts:
        for x in done:
            print(f"\n{tokenizer.decode(x.tokens, skip_special_tokens=True)}")
    if args.check and check(done, server):
        sys.exit(1)


if __name__ == "__main__":
    main()
