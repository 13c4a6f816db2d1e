"""scripts/try_workflow.py: a job of GitHub's runs here as it would there."""

import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

if not (ROOT / ".github").exists():
    pytest.skip("not a checkout", allow_module_level=True)
if not shutil.which("git"):
    pytest.skip("there is no git", allow_module_level=True)

WORKFLOW = """\
name: Small
on: push
env:
  LEVEL: workflow
  GREETING: hello ${{ vars.WHOM || 'you' }}
jobs:
  good:
    runs-on: ubuntu-24.04
    strategy:
      matrix:
        size: [1, 2]
        colour: [red]
        include:
          - {size: 2, shape: round}
          - {size: 3, colour: blue}
    outputs:
      made: ${{ steps.second.outputs.made }}
    env:
      LEVEL: job
      OF_MATRIX: ${{ matrix.colour }}-${{ matrix.size }}
    steps:
      - uses: actions/checkout@v1
      - uses: actions/setup-python@v1
        with: {python-version: "HERE"}
      - uses: somebody/something@v1
      - run: apt-get install -y never
      - run: |
          echo "$LEVEL, $OF_MATRIX, $GREETING, $(cat file)" >> "$GITHUB_STEP_SUMMARY"
          python3 --version >> "$GITHUB_STEP_SUMMARY"
          echo TOLD=later >> "$GITHUB_ENV"
      - id: second
        run: |
          echo "made=$LEVEL-$TOLD-$GITHUB_REF_TYPE" >> "$GITHUB_OUTPUT"
        env:
          LEVEL: step
      - name: of tags
        if: github.ref_type == 'tag' && matrix.size != 2
        run: exit 3
  bad:
    runs-on: ubuntu-24.04
    steps:
      - run: |
          false
          echo "not reached" >> "$GITHUB_STEP_SUMMARY"
      - run: echo never
  pipe:
    runs-on: ubuntu-24.04
    steps:
      - run: false | true
      - run: false | true
        shell: bash
  image:
    runs-on: ubuntu-24.04
    container: some/image:${{ 1 == 1 && 'old' }}
    steps:
      - run: test -z "$BASH_VERSION"
  asked:
    runs-on: ubuntu-24.04
    strategy:
      matrix:
        cell: ${{ fromJSON(needs.good.outputs.made) }}
    steps:
      - run: echo "${{ matrix.cell }} is tried" >> "$GITHUB_STEP_SUMMARY"
  varied:
    runs-on: ubuntu-24.04
    strategy:
      matrix:
        include:
          - {framework: torch, index: "${{ vars.INDEX }}"}
          - {framework: jax, index: "${{ vars.INDEX }}"}
    steps:
      - run: test ${{ matrix.framework }} = jax -a "${{ matrix.index }}" = there
  unknown:
    runs-on: ubuntu-24.04
    steps:
      - run: echo ${{ hashFiles('a') }}
"""


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import try_workflow

    return try_workflow


@pytest.fixture
def call(program, monkeypatch, tmp_path, capfd):
    """Calls the program in a repository with WORKFLOW; its exit status or line, and its output."""
    repository = tmp_path / "repository"
    workflows = repository / ".github" / "workflows"
    workflows.mkdir(parents=True)
    here = f"3.{sys.version_info.minor}"
    (workflows / "small.yml").write_text(WORKFLOW.replace("HERE", here))
    (repository / "file").write_text("committed")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "first"],
    ):
        subprocess.run(["git", *command], cwd=repository, check=True)
    (repository / "file").write_text("changed since")
    python = program.pythons.Python(here, Path(sys.executable))
    monkeypatch.setattr(program.pythons, "find", lambda name: python if name == here else None)
    monkeypatch.setattr(program, "ROOT", repository)
    monkeypatch.setattr(program, "WORKFLOWS", workflows)
    monkeypatch.setattr(program.platform, "machine", lambda: "x86_64")

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["try_workflow.py", *map(str, arguments)])
        try:
            status = program.main()
        except SystemExit as e:
            status = e.code
        return status, capfd.readouterr().out

    return called


def outcomes(record, job):
    jobs = json.loads(record.read_text())["jobs"]
    (tried,) = [entry for entry in jobs if entry["job"] == job and "date" in entry]
    return [step["outcome"].partition(":")[0] for step in tried["steps"]]


def test_a_job_runs_step_by_step(call, tmp_path):
    record = tmp_path / "record.json"
    status, text = call("small", "good", "size=2", "--var", "WHOM=world", "--record", record)
    assert status == 0
    assert f"job, red-2, hello world, committed\nPython {platform.python_version()}" in text
    assert "output made: step-later-branch" in text
    assert "---- somebody/something@v1: left out: an action\n" in text
    assert re.search(r"\napt-get install -y never +0.0  left out: it installs packages", text)
    ran = ["passed", "passed", "left out", "left out", "passed", "passed", "left out"]
    assert outcomes(record, "good") == ran


def test_a_step_that_fails_ends_the_job(call, tmp_path):
    record = tmp_path / "record.json"
    status, text = call("small", "bad", "--record", record)
    assert status == 1
    assert "echo never" in text and "not reached: a step before it failed" in text
    assert "\nnot reached\n" not in text
    assert outcomes(record, "bad") == ["failed", "not reached"]


def test_a_tag_is_pushed(call):
    status, text = call("small", "good", "--tag", "v1")
    assert status == 1
    assert "output" not in text and "of tags" in text and "failed: 3" in text
    assert "red-1, hello you" in text
    assert call("small", "good", "size=2", "--tag", "v1")[0] == 0


def test_shells_are_those_of_github(call):
    """pipefail comes with `shell: bash` alone; a container's is sh."""
    status, text = call("small", "pipe")
    assert status == 1
    assert [line.split()[-1] for line in text.splitlines()[-2:]] == ["passed", "1"]
    status, _ = call("small", "image")
    assert "is for the container some/image:old; --anyway" in status
    if Path("/bin/sh").resolve().name != "bash":
        assert call("small", "image", "--anyway")[0] == 0


def test_a_cell_that_another_job_names(call, tmp_path):
    record = tmp_path / "record.json"
    status, _ = call("small", "asked")
    assert status == (
        "try_workflow: small.yml: asked: name a cell, as cell=…: "
        "${{ fromJSON(needs.good.outputs.made) }}"
    )
    status, text = call("small", "asked", "cell=a==1,b", "--record", record)
    assert status == 0 and "a==1,b is tried" in text
    assert outcomes(record, "asked") == ["passed"]
    call("--record", record)
    assert outcomes(record, "asked") == ["passed"]


def test_a_cell_with_a_value_of_a_variable(call, tmp_path):
    """Its name in the record is the same, whatever the variable is."""
    record = tmp_path / "record.json"
    for _ in range(2):
        arguments = ("framework=jax", "--var", "INDEX=there", "--record", record)
        assert call("small", "varied", *arguments)[0] == 0
        assert outcomes(record, "varied") == ["passed"]
    call("--record", record)
    found = json.loads(record.read_text())["jobs"]
    cells = [(e["cell"], "date" in e) for e in found if e["job"] == "varied"]
    assert cells == [("framework=torch", False), ("framework=jax", True)]


def test_what_is_not_understood_is_one_line(call, program):
    status, _ = call("small", "unknown")
    assert status == "try_workflow: hashFiles(…) in the expression \"hashFiles('a')\""
    status, _ = call("small", "good", "size=4")
    assert status.startswith("try_workflow: small.yml: good: no cell 'size=4'; there is size=1 col")
    for step in ("{run: a, timeout-minutes: 1}", "{run: a, working-directory: b}"):
        text = f"jobs: {{one: {{runs-on: ubuntu-24.04, steps: [{step}]}}}}"
        (program.WORKFLOWS / "small.yml").write_text(text)
        status, _ = call()
        assert status.startswith("try_workflow: small.yml: one: a step with ")


def test_jobs_and_cells_are_listed(call):
    status, text = call()
    assert status == 0
    cells = ["size=1 colour=red", "size=2 colour=red shape=round", "size=3 colour=blue"]
    assert text.splitlines()[:2] == [f"small good: {', '.join(cells)}", "small bad"]


def test_a_record_has_every_job(call, program, tmp_path):
    record = tmp_path / "record.json"
    call("small", "good", "size=2", "--record", record)
    call("small", "bad", "--record", record)
    found = json.loads(record.read_text())["jobs"]
    tried = [(e["job"], e["cell"]) for e in found if "date" in e]
    assert tried == [("good", "size=2 colour=red shape=round"), ("bad", "")]
    assert len(found) == 10
    (image,) = [e for e in found if e["job"] == "image"]
    assert image["elsewhere"] == ["the container some/image:old"]
    file = program.WORKFLOWS / "small.yml"
    file.write_text(file.read_text().replace("\n  bad:", "\n  worse:"))
    call("--record", record)
    assert [e["job"] for e in json.loads(record.read_text())["jobs"]][3] == "worse"
    assert "date" not in json.loads(record.read_text())["jobs"][3]


def test_the_page_says_where_a_job_was_not(monkeypatch):
    """One that --anyway ran outside its container has passed there alone."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("page", ROOT / "benchmarks" / "render.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    step = {"step": "make", "outcome": "passed", "seconds": 2.0}
    job = {"workflow": "ci", "job": "wheels", "cell": "", "actions": [], "steps": [step]}
    job |= {"date": "2000-01-01", "elsewhere": ["the container a/b:1"]}
    text = page.workflows({"machine": "x86_64", "jobs": [job, {**job, "elsewhere": []}]})
    assert "| passed: `make` in 2 s; not in the container a/b:1 (2000-01-01) |" in text
    assert "| passed: `make` in 2 s (2000-01-01) |" in text


@pytest.mark.parametrize(
    "text, value",
    [
        ("'it''s'", "it's"),
        ("vars.A == 'ONE' && vars.none || 'else'", "else"),
        ("!(vars.A != 'one')", True),
        ("fromJSON('[1]')", [1]),
        ("matrix.n == 3.5 || false", True),
        ("vars.none", None),
    ],
)
def test_expressions(program, text, value):
    context = {"vars": {"A": "one"}, "matrix": {"n": 3.5}}
    assert program.Expression(text, context).value() == value


@pytest.mark.parametrize("text", ["matrix.m", "job.status", "(1", "1 2", "1 ==", "a[0]", "f()"])
def test_expressions_that_are_not_known(program, text):
    with pytest.raises(program.NotUnderstoodError, match="in the expression"):
        program.Expression(text, {"matrix": {}, "a": {}}).value()


def test_the_machine_counts(program, monkeypatch, tmp_path):
    file = tmp_path / "a.yml"
    file.write_text("jobs: {one: {runs-on: 'ubuntu-24.04${{ matrix.arm }}', steps: []}}")
    job = program.read(file)["one"]
    for machine, arm, wanted in (
        ("x86_64", "", []),
        ("aarch64", "-arm", []),
        ("x86_64", "-arm", ["the machine ubuntu-24.04-arm"]),
    ):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert job.elsewhere({"matrix": {"arm": arm}}) == wanted
