"""The command line: ``flashsdk info | demo | verify | bench | config``, or ``-m flashsdk``."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from flashsdk._bindings import MAX_THREADS
from flashsdk._commands import INTERRUPTED
from flashsdk._commands.config import OPTIONS
from flashsdk._errors import Error, InvalidArgument

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        self.exit(USAGE_ERROR, f"{self.prog}: {message}; --help lists what is allowed\n")


class Version(argparse.Action):
    """Prints the version; loads the library only when asked."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="the version, and nothing else")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import flashsdk as fs

        print(f"flashsdk {fs.__version__}")
        parser.exit()


def parser() -> Parser:
    top = Parser(prog="flashsdk", description="Exact attention: FlashAttention kernels.")
    top.add_argument("--version", action=Version)
    commands = top.add_subparsers(
        dest="command", required=True, metavar="info | demo | verify | bench | config"
    )

    info = commands.add_parser("info", help="version, backends, instruction sets and kernels")
    info.add_argument("--all", action="store_true", help="list every kernel")
    info.add_argument("--json", action="store_true", help="everything, as JSON")

    demo = commands.add_parser(
        "demo", help="attention at the shapes of real models beside standard attention"
    )
    demo.add_argument(
        "--out", default="demo.png", metavar="PNG", help="picture (default %(default)s)"
    )
    demo.add_argument("--record", metavar="JSON", help="also write the figures there")

    verify = commands.add_parser("verify", help="random problems against a float64 reference")
    verify.add_argument("--seconds", type=duration, metavar="S", help="for so long (default 30)")
    verify.add_argument("--count", type=positive_int, metavar="N", help="so many problems")
    verify.add_argument("--seed", type=natural, metavar="N", help="one problem, again and exactly")
    verify.add_argument(
        "--first-seed", type=natural, metavar="N", help="of the problems (default: a random one)"
    )
    verify.add_argument("--backend", choices=("cpu", "sm80", "sm90"), default="cpu")
    verify.add_argument("--framework", choices=("numpy", "torch"), help="of the arrays")

    bench = commands.add_parser(
        "bench", help="speed, as a share of the machine's peak and beside PyTorch"
    )
    bench.add_argument("--quick", action="store_true", help="small sizes, few samples")
    bench.add_argument(
        "--filter", nargs="+", default=[], metavar="WORD", help="rows named so: bf16 fwd 4096"
    )
    bench.add_argument(
        "--out", default="flashsdk-bench", metavar="DIR", help="(default %(default)s)"
    )
    bench.add_argument(
        "--backend", choices=("cpu", "sm80", "sm90"), default="cpu", help="of a GPU: with --shape"
    )
    bench.add_argument(
        "--shape",
        type=shape,
        metavar="B,S,H[:Hkv],D",
        help="one problem of yours instead: batch, seqlen, heads (of queries:of keys), head_dim; "
        "beside what of PyTorch and JAX is installed",
    )
    bench.add_argument(
        "--mask",
        type=mask,
        metavar="MASK",
        help="of --shape: none, causal, window:L or window:L,R (default none)",
    )
    bench.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="of --shape (default fp32, on a GPU bf16)"
    )

    config = commands.add_parser("config", help="where headers, library and CMake package are")
    for option, text in OPTIONS.items():
        config.add_argument(
            f"--{option}", dest="options", action="append_const", const=option, help=text
        )

    top.set_defaults(isa=None, threads=None)
    for command in (info, demo, verify, bench):
        command.add_argument(
            "--isa", type=isa, metavar="NAME", help="CPU instruction set (default: the best)"
        )
        command.add_argument("--threads", type=threads, metavar="N", help="CPU threads")
    return top


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    if args.command == "config" and args.options is None:
        parser().error(f"config: no option; one or more of --{', --'.join(OPTIONS)}")
    if args.isa is not None and os.environ.get("FLASHSDK_CPU_ISA") != args.isa:
        # The library chooses once, when it is loaded: start again with the choice made.
        os.environ["FLASHSDK_CPU_ISA"] = args.isa
        os.execv(sys.executable, [sys.executable, "-m", "flashsdk", *argv])
    try:
        return run(args)
    except Error as e:
        message = str(e)
        if args.isa is not None and message.startswith("FLASHSDK_CPU_ISA: "):
            message = "--isa" + message.removeprefix("FLASHSDK_CPU_ISA")  # what the user wrote
        print(f"flashsdk {args.command}: {message}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is still buffered would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"flashsdk {args.command}: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED


def run(args: argparse.Namespace) -> int:
    import flashsdk as fs
    from flashsdk._commands import bench, bench_shape, config, demo, info, verify

    if args.threads is not None:
        fs.set_num_threads(args.threads)
    match args.command:
        case "info":
            return info.run(every=args.all, as_json=args.json)
        case "demo":
            return demo.run(args.out, args.record)
        case "verify":
            return verify.run(
                seconds=args.seconds,
                count=args.count,
                seed=args.seed,
                first_seed=args.first_seed,
                backend=args.backend,
                framework=args.framework,
            )
        case "config":
            return config.run(args.options)
        case _ if args.shape is not None:
            if args.filter:
                raise InvalidArgument(f"--filter: {' '.join(args.filter)}; none with --shape")
            return bench_shape.run(
                args.shape,
                args.mask or "none",
                args.dtype,
                backend=args.backend,
                quick=args.quick,
                out=args.out,
            )
        case _:
            for name in ("mask", "dtype"):
                if getattr(args, name) is not None:
                    raise InvalidArgument(f"--{name}: {getattr(args, name)}; none without --shape")
            if args.backend != "cpu":
                raise InvalidArgument(f"--backend: {args.backend}; cpu without --shape")
            return bench.run(
                backend=args.backend, quick=args.quick, words=args.filter, out=args.out
            )


Number = TypeVar("Number", int, float)


def _number(
    kind: Callable[[str], Number], text: str, least: float, allowed: str, most: float = math.inf
) -> Number:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most or value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; {allowed}")
    return value


def positive_int(text: str) -> int:
    return _number(int, text, 1, "an integer >= 1")


def threads(text: str) -> int:
    return _number(int, text, 1, f"1 to {MAX_THREADS}", most=MAX_THREADS)


def isa(text: str) -> str:
    if not text:  # the library takes an empty variable for none; which others there are, it tells
        raise argparse.ArgumentTypeError("''; a name that info lists")
    return text


def shape(text: str) -> tuple[int, ...]:
    """batch, seqlen, heads, heads_kv, head_dim."""
    try:
        batch, seqlen, heads, head_dim = text.split(",")
        of_q, _, of_kv = heads.partition(":")
        sizes = tuple(int(x) for x in (batch, seqlen, of_q, of_kv or of_q, head_dim))
    except ValueError:
        sizes = (0,)
    if min(sizes) < 1 or sizes[2] % sizes[3]:
        allowed = "B,S,H,D or B,S,H:Hkv,D, as 2,4096,32:8,128; H a multiple of Hkv"
        raise argparse.ArgumentTypeError(f"{text!r}; {allowed}")
    return sizes


def mask(text: str) -> str:
    if not re.fullmatch(r"none|causal|window:[0-9]+(,[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}; none, causal, window:L or window:L,R")
    return text


def natural(text: str) -> int:
    return _number(int, text, 0, "an integer >= 0")


def duration(text: str) -> float:
    return _number(float, text, 1e-3, "seconds, above 0")
