"""Runs a job of a GitHub workflow on this machine, in a fresh clone, as GitHub would.

    python scripts/try_workflow.py                          lists all jobs and their cells
    python scripts/try_workflow.py ci lint
    python scripts/try_workflow.py ci compilers compiler=g++-12
    python scripts/try_workflow.py wheels version --tag v0.1.0 [--record FILE]

A cell of a matrix is named by its values; without them it is the first. Expressions, environments,
conditions and shells are GitHub's: a step that fails ends its job. actions/checkout is a clone of
this commit, actions/setup-python a Python of scripts/pythons.py in front of PATH. Left out, and
named, are all other actions and the steps that install packages of the system. A job that is for a
container or another machine is refused; --anyway runs its steps here. What is not understood ends
this with a line that says so.

The environment of this program goes through: JOBS=1, or what pip has to know. A record tells of
every job, tried or not; with --record alone the list of jobs is brought up to date.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pythons
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
SHELLS = {
    None: ("bash", "-e"),
    "bash": ("bash", "--noprofile", "--norc", "-eo", "pipefail"),
    "sh": ("sh", "-e"),
}
# What is told apart below, or changes nothing here.
JOB_KEYS = {"container", "defaults", "env", "environment", "if", "name", "needs", "outputs"}
JOB_KEYS |= {"permissions", "runs-on", "steps", "strategy", "timeout-minutes"}
STEP_KEYS = {"env", "id", "if", "name", "run", "shell", "uses", "with"}
# Contexts whose values GitHub has: what is not given with --var is empty.
OPEN = {"env", "inputs", "secrets", "vars"}
INSTALLS = re.compile(r"\b(apt-get|apt|dnf|yum) ")
# Of this program's own environment; a runner has none of it.
OURS = re.compile(r"PYTHON|VIRTUAL_ENV|MAKE|MFLAGS|GITHUB_|FLASHSDK_|CXX$|CC$")

Context = dict[str, Any]


class NotUnderstoodError(Exception):
    """A part of a workflow that this program does not know. The message is one line."""


# ---- expressions

TOKEN = re.compile(
    r"\s*(?:'(?P<string>(?:[^']|'')*)'|(?P<number>-?\d+(?:\.\d+)?\b)"
    r"|(?P<name>[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*)|(?P<sign>==|!=|&&|\|\||[!()]))"
)
LITERALS = {"true": True, "false": False, "null": None}
FUNCTIONS = {"fromJSON": json.loads, "toJSON": json.dumps}


def shown(value: Any) -> str:
    """A value as it stands in a string."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


class Expression:
    """What stands between ${{ and }}: values, ==, !=, !, &&, || and a few functions."""

    def __init__(self, text: str, context: Context) -> None:
        self.text, self.context = text.strip(), context
        self.tokens = list(self.split())

    def unknown(self, what: str) -> NotUnderstoodError:
        return NotUnderstoodError(f"{what} in the expression {self.text!r}")

    def split(self) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(self.text):
            found = TOKEN.match(self.text, at)
            if not found or not found.lastgroup:
                raise self.unknown(repr(self.text[at:]))
            at = found.end()
            yield found.lastgroup, found[found.lastgroup]

    def value(self) -> Any:
        found = self.either()
        if self.tokens:
            raise self.unknown(repr(self.tokens[0][1]))
        return found

    def takes(self, *signs: str) -> str | None:
        if self.tokens and self.tokens[0][0] == "sign" and self.tokens[0][1] in signs:
            return self.tokens.pop(0)[1]
        return None

    def either(self) -> Any:
        found = self.both()
        while self.takes("||"):
            other = self.both()
            found = found or other
        return found

    def both(self) -> Any:
        found = self.comparison()
        while self.takes("&&"):
            other = self.comparison()
            found = found and other
        return found

    def comparison(self) -> Any:
        found = self.single()
        while sign := self.takes("==", "!="):
            # Of strings the case does not count.
            pair = [x.lower() if isinstance(x, str) else x for x in (found, self.single())]
            found = (pair[0] == pair[1]) == (sign == "==")
        return found

    def single(self) -> Any:
        if self.takes("!"):
            return not self.single()
        if self.takes("("):
            found = self.either()
            if not self.takes(")"):
                raise self.unknown("an open bracket")
            return found
        if not self.tokens or self.tokens[0][0] == "sign":
            raise self.unknown("no value")
        kind, text = self.tokens.pop(0)
        if kind == "string":
            return text.replace("''", "'")
        if kind == "number":
            return float(text) if "." in text else int(text)
        if self.takes("("):
            argument = self.either()
            if text not in FUNCTIONS or not self.takes(")"):
                raise self.unknown(f"{text}(…)")
            return FUNCTIONS[text](argument)
        return LITERALS[text] if text in LITERALS else self.property(text)

    def property(self, path: str) -> Any:
        first, *rest = path.split(".")
        if first not in self.context:
            raise self.unknown(path)
        found = self.context[first]
        for name in rest:
            if first in OPEN and name not in found:
                return None
            if not isinstance(found, dict) or name not in found:
                raise self.unknown(path)
            found = found[name]
        return found


def filled(text: Any, context: Context) -> str:
    """A string with the values of its expressions."""
    return re.sub(
        r"\$\{\{(.*?)\}\}", lambda m: shown(Expression(m[1], context).value()), shown(text)
    )


def ready(value: Any, context: Context) -> Any:
    """A value of a matrix, whose type stays where there is no expression."""
    return filled(value, context) if isinstance(value, str) else value


def condition(text: Any, context: Context) -> bool:
    """Of an `if:`, where the braces may be missing."""
    bare = re.sub(r"^\s*\$\{\{(.*)\}\}\s*$", r"\1", shown(text))
    return bool(Expression(bare, context).value())


# ---- workflows


class Job:
    """A job of a workflow's file. Keys that this program does not know are refused."""

    def __init__(self, file: Path, name: str, workflow: dict[str, Any]) -> None:
        self.file, self.name, self.workflow = file, name, workflow
        self.job = workflow["jobs"][name]
        for kind, there, known in (
            ("a job", self.job, JOB_KEYS),
            *(("a step", step, STEP_KEYS) for step in self.job.get("steps", [])),
        ):
            if unknown := sorted(set(there) - known):
                raise NotUnderstoodError(f"{self}: {kind} with {', '.join(unknown)}")
        if "steps" not in self.job:
            raise NotUnderstoodError(f"{self}: a job without steps")

    def __str__(self) -> str:
        return f"{self.file.name}: {self.name}"

    def cells(self, variables: dict[str, str]) -> list[dict[str, Any]]:
        """One dict a cell, {} without a matrix. Values that another job gives stay expressions."""

        def known(cell: dict[str, Any]) -> dict[str, Any]:
            return {k: v if is_open(v) else ready(v, {"vars": variables}) for k, v in cell.items()}

        matrix = self.job.get("strategy", {}).get("matrix", {})
        if not isinstance(matrix, dict) or "exclude" in matrix:
            raise NotUnderstoodError(f"{self}: a matrix that is an expression, or has exclude")
        include = [known(cell) for cell in matrix.get("include", [])]
        matrix = {name: values for name, values in matrix.items() if name != "include"}
        axes = {k: v if isinstance(v, list) else [v] for k, v in matrix.items()}
        products = itertools.product(*axes.values())
        cells = [known(dict(zip(axes, values))) for values in products]
        if include and not axes:
            return include
        alone = []
        for more in include:  # goes to the cells that it contradicts in no axis, else is its own
            fits = [c for c in cells if all(c[k] == v for k, v in more.items() if k in axes)]
            for cell in fits:
                cell.update(more)
            alone += [] if fits else [more]
        return cells + alone

    def cell(self, given: dict[str, str], variables: dict[str, str]) -> dict[str, Any]:
        """The first cell with these values. A value that another job gives is taken as given."""
        cells = self.cells(variables)
        for cell in cells:
            if set(given) - set(cell):
                continue
            if all(is_open(cell[k]) or shown(cell[k]) == v for k, v in given.items()):
                chosen = {k: given.get(k, v) if is_open(v) else v for k, v in cell.items()}
                if missing := [k for k, v in chosen.items() if is_open(v)]:
                    name = missing[0]
                    raise NotUnderstoodError(f"{self}: name a cell, as {name}=…: {cell[name]}")
                return chosen
        there = "; ".join(map(called, cells))
        raise NotUnderstoodError(f"{self}: no cell {called(given)!r}; there is {there or 'one'}")

    def fixed(self, cell: dict[str, Any]) -> dict[str, Any]:
        """A cell without what variables of the repository give: its name in the record."""
        matrix = self.job.get("strategy", {}).get("matrix", {})
        values = [(name, x) for name, x in matrix.items() if name != "include"]
        values += [pair for more in matrix.get("include", []) for pair in more.items()]
        given = {name for name, x in values if "${{" in str(x) and "vars." in str(x)}
        return {name: value for name, value in cell.items() if name not in given}

    def container(self) -> str:
        named = self.job.get("container", "")
        return named["image"] if isinstance(named, dict) else named

    def elsewhere(self, context: Context) -> list[str]:
        """What it is for and this machine is not."""
        runner = filled(self.job["runs-on"], context)
        found = [f"the container {filled(self.container(), context)}"] if self.container() else []
        machine = "aarch64" if runner.endswith("-arm") else "x86_64"
        if not runner.startswith("ubuntu-") or machine != platform.machine():
            found.append(f"the machine {runner}")
        return found


def is_open(value: Any) -> bool:
    """Whether another job gives a value of a matrix."""
    return isinstance(value, str) and "${{" in value and "needs." in value


def called(cell: dict[str, Any]) -> str:
    """The name of a cell, as the command line has it."""
    return " ".join(f"{key}={shown(value)}" for key, value in cell.items() if shown(value))


def read(file: Path) -> dict[str, Job]:
    workflow = yaml.safe_load(file.read_text("utf-8"))
    return {name: Job(file, name, workflow) for name in workflow["jobs"]}


# ---- one job


class Run:
    """A job in a cell, in a folder of its own."""

    def __init__(
        self,
        job: Job,
        cell: dict[str, Any],
        folder: Path,
        commit: str,
        tag: str,
        variables: dict[str, str],
    ) -> None:
        self.job, self.folder, self.sources = job, folder, folder / "sources"
        self.commit = commit
        self.path: list[str] = []  # in front of PATH
        name, kind = (tag, "tag") if tag else ("main", "branch")
        self.context: Context = {
            "env": {},
            "github": {
                "event_name": "push",
                "ref": f"refs/{'tags' if tag else 'heads'}/{name}",
                "ref_name": name,
                "ref_type": kind,
                "sha": self.commit,
                "token": "",
                "workflow": job.workflow.get("name", job.file.name),
            },
            "inputs": {},
            "matrix": cell,
            "secrets": {},
            "steps": {},
            "vars": variables,
        }
        self.outputs: dict[str, str] = {}
        self.files = {
            name: folder / name
            for name in ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_PATH", "GITHUB_STEP_SUMMARY")
        }

    def enter(self, env: dict[str, Any]) -> None:
        """Into the context `env`, in order: later values see earlier ones of other levels."""
        values = {name: filled(value, self.context) for name, value in env.items()}
        self.context["env"] = {**self.context["env"], **values}

    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not OURS.match(name)}
        github = self.context["github"]
        told = {f"GITHUB_{key.upper()}": github[key] for key in github if key != "token"}
        files = {name: str(path) for name, path in self.files.items()}
        path = os.pathsep.join([*self.path, own["PATH"]])
        fixed = {"CI": "true", "GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(self.sources)}
        return {**own, **fixed, **told, **files, "PATH": path, **self.context["env"]}

    def steps(self) -> list[dict[str, Any]]:
        """Runs them; what the record says of each."""
        self.enter(self.job.workflow.get("env", {}))
        self.enter(self.job.job.get("env", {}))
        self.sources.mkdir(parents=True)
        done: list[dict[str, Any]] = []
        ended = "" if condition(self.job.job.get("if", True), self.context) else "its if is false"
        for step in self.job.job["steps"]:
            level = self.context["env"]
            began = time.monotonic()
            name = filled(title(step), self.context)
            if ended:
                outcome = f"not reached: {ended}"
            else:
                self.enter(step.get("env", {}))
                print(f"---- {name}", flush=True)
                outcome = self.step(step)
                print(f"---- {name}: {outcome}", flush=True)
            self.context["env"] = level
            self.read_files(step.get("id"))
            done.append(
                {"step": name, "outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
            )
            if outcome.startswith("failed"):
                ended = "a step before it failed"
        if not ended:
            named = self.job.job.get("outputs", {})
            self.outputs = {name: filled(text, self.context) for name, text in named.items()}
        return done

    def step(self, step: dict[str, Any]) -> str:
        if not condition(step.get("if", True), self.context):
            return "left out: its if is false"
        if "uses" in step:
            action, _, _ = step["uses"].partition("@")
            given = {k: filled(v, self.context) for k, v in step.get("with", {}).items()}
            if action == "actions/checkout" and not given:
                return self.check_out()
            if action == "actions/setup-python" and set(given) == {"python-version"}:
                return self.set_up(given["python-version"].split())
            return "left out: an action"
        if INSTALLS.search(step["run"]):
            return "left out: it installs packages of the system"
        return self.run(step)

    def check_out(self) -> str:
        git(ROOT, "clone", "-q", "--no-checkout", ".", str(self.sources))
        git(self.sources, "checkout", "-q", "--detach", self.commit)
        return f"passed: a clone of {self.commit[:12]}"

    def set_up(self, series: list[str]) -> str:
        found = {name: pythons.find(name) for name in series}
        missing = [name for name, python in found.items() if not python]
        for python in found.values():  # the last one's python3 is the one that is found
            if python:
                self.path.insert(0, str(python.path.parent))
        if missing:
            return f"failed: there is no Python {', '.join(missing)} here"
        return f"passed: Python {', '.join(series)} of this machine"

    def run(self, step: dict[str, Any]) -> str:
        defaults = self.job.job.get("defaults", self.job.workflow.get("defaults", {}))
        shell = step.get("shell", defaults.get("run", {}).get("shell"))
        if shell is None and self.job.container():
            shell = "sh"
        if shell not in SHELLS:
            raise NotUnderstoodError(f"{self.job}: the shell {shell!r}")
        script = self.folder / "step.sh"
        script.write_text(filled(step["run"], self.context) + "\n")
        command = [*SHELLS[shell], str(script)]
        status = subprocess.run(command, cwd=self.sources, env=self.environment()).returncode
        return f"failed: {status}" if status else "passed"

    def read_files(self, step: str | None) -> None:
        """What a step has written for those after it."""
        values = {name: pairs(self.files[name]) for name in ("GITHUB_ENV", "GITHUB_OUTPUT")}
        self.context["env"] = {**self.context["env"], **values["GITHUB_ENV"]}
        if step:
            self.context["steps"][step] = {"outputs": values["GITHUB_OUTPUT"]}
        if self.files["GITHUB_PATH"].exists():
            self.path[:0] = reversed(self.files["GITHUB_PATH"].read_text().split("\n")[:-1])
        for name in ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_PATH"):
            self.files[name].unlink(missing_ok=True)


def title(step: dict[str, Any]) -> str:
    return step.get("name") or step.get("uses") or step["run"].strip().partition("\n")[0]


def short(text: str) -> str:
    return text if len(text) <= 72 else text[:71] + "…"


def pairs(file: Path) -> dict[str, str]:
    """name=value, a line each."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = [line.partition("=") for line in lines if line]
    if bad := [name for name, equals, _ in found if not equals]:
        raise NotUnderstoodError(f"{file.name} got {bad[0]!r}; name=value is known alone")
    return {name: value for name, _, value in found}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


# ---- what is told


def list_jobs(jobs: dict[str, dict[str, Job]]) -> None:
    for file, there in jobs.items():
        for name, job in there.items():
            cells = [called(cell) for cell in job.cells({})]
            print(f"{file} {name}" + (": " + ", ".join(cells) if cells != [""] else ""))


def where(job: Job, cell: dict[str, Any]) -> dict[str, Any]:
    """What the record says of a cell before it is tried."""
    context = {"matrix": cell, "vars": {}}
    return {
        "workflow": job.file.stem,
        "job": job.name,
        "cell": called(job.fixed(cell)),
        "runs_on": filled(job.job["runs-on"], context),
        "elsewhere": job.elsewhere(context),
        "actions": [step["uses"] for step in job.job["steps"] if "uses" in step],
    }


def write_record(
    path: Path, jobs: dict[str, dict[str, Job]], tried: dict[str, Any] | None = None
) -> None:
    """Every job is in it. What was tried replaces what the record had of that cell."""
    before = json.loads(path.read_text())["jobs"] if path.exists() else []
    have = {key(entry): entry for entry in [*before, *([tried] if tried else [])]}
    entries = []
    for job in (job for there in jobs.values() for job in there.values()):
        listed = [where(job, cell) for cell in job.cells({})]
        # Cells that another job names are in no list.
        named = [e for k, e in have.items() if k[:2] == (job.file.stem, job.name)]
        entries += [{**entry, **outcome(have.get(key(entry), {}))} for entry in listed]
        entries += [e for e in named if key(e) not in map(key, listed) and "${{" in str(listed)]
    assert tried is None or key(tried) in map(key, entries)
    record = {"kind": "workflows", "machine": platform.machine(), "jobs": entries}
    path.write_text(json.dumps(record, indent=1) + "\n")


def key(entry: dict[str, Any]) -> tuple[str, str, str]:
    return entry["workflow"], entry["job"], entry["cell"]


def outcome(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("date", "commit", "steps") if name in entry}


def print_table(steps: list[dict[str, Any]]) -> None:
    width = max(len(short(step["step"])) for step in steps)
    print(f"\n{'step':{width}}  seconds  here")
    for step in steps:
        print(f"{short(step['step']):{width}}  {step['seconds']:7.1f}  {step['outcome']}")


def assignments(parser: argparse.ArgumentParser, given: list[str]) -> dict[str, str]:
    if bad := [text for text in given if "=" not in text]:
        parser.error(f"{bad[0]!r}; name=value")
    return dict(text.split("=", 1) for text in given)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workflow", nargs="?", help="a file of .github/workflows, such as ci")
    parser.add_argument("job", nargs="?")
    parser.add_argument("cell", nargs="*", metavar="name=value", help="of the matrix")
    parser.add_argument("--tag", default="", help="as if this tag had been pushed, not main")
    parser.add_argument("--var", action="append", default=[], metavar="N=VALUE", help="for vars.N")
    parser.add_argument("--anyway", action="store_true", help="though it is for another machine")
    parser.add_argument("--record", type=Path, help="where the outcome goes, as JSON")
    args = parser.parse_args()
    try:
        jobs = {file.stem: read(file) for file in sorted(WORKFLOWS.glob("*.yml"))}
        if not args.job:
            if args.record:
                write_record(args.record, jobs)
            list_jobs({name: jobs[name] for name in jobs if args.workflow in (None, name)})
            return 0
        if args.job not in jobs.get(args.workflow, {}):
            parser.error(f"no job {args.job} of {args.workflow}: call this without arguments")
        job = jobs[args.workflow][args.job]
        variables = assignments(parser, args.var)
        cell = job.cell(assignments(parser, args.cell), variables)
        theirs = job.elsewhere({"matrix": cell, "vars": variables})
        if theirs and not args.anyway:
            sys.exit(f"try_workflow: {job} is for {' and '.join(theirs)}; --anyway runs it here")
        with tempfile.TemporaryDirectory() as folder:
            commit = git(ROOT, "rev-parse", "HEAD")
            run = Run(job, cell, Path(folder), commit, args.tag, variables)
            steps = run.steps()
            summary = run.files["GITHUB_STEP_SUMMARY"]
            print(summary.read_text() if summary.exists() else "", end="")
        print_table(steps)
        for name, value in run.outputs.items():
            print(f"output {name}: {value}")
        if args.record:
            date = datetime.date.today().isoformat()
            tried = {"date": date, "commit": commit[:12], "steps": steps}
            write_record(args.record, jobs, {**where(job, cell), **tried})
    except NotUnderstoodError as e:
        sys.exit(f"try_workflow: {e}")
    return int(any(step["outcome"].startswith("failed") for step in steps))


if __name__ == "__main__":
    sys.exit(main())
