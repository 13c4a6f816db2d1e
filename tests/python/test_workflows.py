"""The files of GitHub Actions call what there is. Their form is checked by `make lint`."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"

if not WORKFLOWS.exists():
    pytest.skip("not a checkout", allow_module_level=True)


def commands() -> list[str]:
    """What their steps run, one line each."""
    found = []
    for file in sorted(WORKFLOWS.glob("*.yml")):
        found += re.findall(r"(?:run: |^ {10})(\S.*)$", file.read_text("utf-8"), re.MULTILINE)
    assert len(found) > 15
    return found


def test_targets_and_scripts_exist():
    text = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([\w-]+):", text, re.MULTILINE))
    named = [t for c in commands() for t in re.findall(r"\bmake ([\w-]+)", c)]
    assert len(named) > 8
    assert not set(named) - targets
    assert {"coverage-python", "coverage-cpp"} <= set(named)
    scripts = {s for c in commands() for s in re.findall(r"scripts/\w+\.py", c)}
    assert scripts and all((ROOT / script).exists() for script in scripts)


@pytest.fixture
def script(monkeypatch):
    """A program of scripts/ as a module; they import each other by name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return lambda name: __import__(name)


def jobs(script) -> list:
    program = script("try_workflow")
    found = [job for file in WORKFLOWS.glob("*.yml") for job in program.read(file).values()]
    assert len(found) > 10
    return found


def test_every_expression_has_a_value(script):
    """In each cell: of what the matrix has, other jobs' outputs and the repository's variables."""
    program = script("try_workflow")
    count = 0
    for job in jobs(script):
        there = job.workflow["jobs"]
        needs = job.job.get("needs", [])
        needs = [needs] if isinstance(needs, str) else needs
        assert set(needs) <= set(there), str(job)
        outputs = {n: {"outputs": dict.fromkeys(there[n].get("outputs", {}), "[1]")} for n in needs}
        for cell in job.cells({}):
            context = program.Run(job, cell, ROOT / "build", "", "v1", {}).context
            context["needs"] = outputs
            for step in job.job["steps"]:
                named = re.findall(r"steps\.\w+\.outputs\.(\w+)", str(job.job.get("outputs", "")))
                context["steps"][step.get("id")] = {"outputs": dict.fromkeys(named, "1")}
            for text in strings(job.job):
                program.filled(text, context)
                count += "${{" in text
            for what in (job.job, *job.job["steps"]):
                program.condition(what.get("if", True), context)
    assert count > 10


def strings(value) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for part in value for text in strings(part)]
    return [value] if isinstance(value, str) else []


def test_shells_read_every_step(script, tmp_path):
    """Of a container sh, else bash."""
    program = script("try_workflow")
    count = 0
    for job in jobs(script):
        for step in job.job["steps"]:
            if "run" in step:
                text = re.sub(r"\$\{\{.*?\}\}", "value", step["run"])
                (tmp_path / "step").write_text(text)
                shell = program.SHELLS["sh" if job.container() else None][0]
                subprocess.run([shell, "-n", tmp_path / "step"], check=True)
                # What is bash's alone is no error of form: a pattern in a parameter, [[.
                assert not job.container() or not re.search(r"\$\{\w+/|\[\[", text), str(job)
                count += 1
    assert count > 15


def test_artifacts_come_from_a_job_before(script):
    """By name, or all that a pattern with braces and stars finds."""
    found = 0
    for job in jobs(script):
        there = job.workflow["jobs"]
        needs, before = [job.name], set()
        while needs:
            more = there[needs.pop()].get("needs", [])
            more = [more] if isinstance(more, str) else more
            before |= set(more)
            needs += more
        made = {
            re.sub(r"\$\{\{.*?\}\}", "x", step["with"]["name"])
            for name in before
            for step in there[name]["steps"]
            if step.get("uses", "").startswith("actions/upload-artifact@")
        }
        for step in job.job["steps"]:
            if step.get("uses", "").startswith("actions/download-artifact@"):
                asked = step["with"].get("name") or step["with"].get("pattern", "*")
                for name in asked.strip("{}").split(","):
                    assert any(fnmatch.fnmatch(m, name) for m in made), f"{job}: {name}"
                    found += 1
    assert found > 3


def test_jobs_may_do_little_and_end(script):
    """Rights are given by the job; every job has a limit of time, and every action a version."""
    for job in jobs(script):
        assert job.workflow["permissions"] == {"contents": "read"}
        assert job.job.get("permissions", {}).keys() <= {"contents", "id-token"}
        assert 5 <= job.job["timeout-minutes"] <= 360
        for step in job.job["steps"]:
            assert re.search(r"@(v\d|release/v\d)", step.get("uses", "@v1")), str(job)


def test_variables_of_the_repository_are_told_of():
    text = "".join(file.read_text("utf-8") for file in WORKFLOWS.glob("*.yml"))
    named = set(re.findall(r"\bvars\.(\w+)", text))
    assert len(named) > 3
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert named == set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.MULTILINE))


def test_the_record_has_every_job(script):
    """Of those tried and not tried: scripts/try_workflow.py --record brings it up to date."""
    record = json.loads((ROOT / "benchmarks" / "results" / "workflows.json").read_text("utf-8"))
    found = {(entry["workflow"], entry["job"]) for entry in record["jobs"]}
    assert found == {(job.file.stem, job.name) for job in jobs(script)}


def test_a_tag_is_the_version_and_the_changelog_has_it(script, tmp_path):
    (job,) = [job for job in jobs(script) if job.name == "version"]
    steps = [step["run"] for step in job.job["steps"] if "run" in step]
    assert len(steps) == 2
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.3] - 2026-01-01\n")
    for tag, status in (("v1.2.3", 0), ("v1.2", 1), ("v1.2.30", 1), ("v2.2.3", 1)):
        env = {**os.environ, "GITHUB_REF_NAME": tag}
        for step in steps:
            done = subprocess.run(["bash", "-e", "-c", step], cwd=tmp_path, env=env)
            assert done.returncode == status, (tag, step)


def test_a_python_is_found_behind_one_without_a_lock(script, monkeypatch, tmp_path):
    """Whose folder has a python3.14 too, and is earlier on the path."""
    pythons = script("pythons")
    for folder, name, series in (
        ("free", "python3.14t", "3.14t"),
        ("free", "python3.14", "3.14t"),
        ("locked", "python3.14", "3.14"),
    ):
        file = tmp_path / folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {series} {file}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/free:{tmp_path}/locked:/bin:/usr/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert pythons.find("3.14").path == tmp_path / "locked" / "python3.14"
    assert pythons.find("3.14t").path == tmp_path / "free" / "python3.14t"


def test_wheels_understands_its_options(script, monkeypatch):
    wheels = script("wheels")
    given = [re.search(r'WHEEL_ARGS=(?:"(.*?)"|(\S+))', c) for c in commands()]
    given = [found[1] or found[2] for found in given if found]
    assert len(given) > 2
    for options in given:
        monkeypatch.setattr(sys, "argv", ["wheels.py", "--out", "there", *options.split()])
        args = wheels.arguments()
        assert args.options["FLASHSDK_CUDA"] == ("ON" if "--cuda" in options else "OFF")


def test_wheels_that_are_published_have_the_operators():
    """Built with the oldest PyTorch that CMake takes for them."""
    text = (WORKFLOWS / "wheels.yml").read_text("utf-8")
    (oldest,) = re.findall(
        r"FLASHSDK_OLDEST_TORCH ([\d.]+)", (ROOT / "cmake" / "Torch.cmake").read_text("utf-8")
    )
    assert re.findall(r"torch==([\d.]+)", text) == [f"{oldest}.0"]
    made = [c for c in text.splitlines() if "WHEEL_ARGS=" in c]
    assert len(made) == 2 and all("--torch $PYTHON_WITH_TORCH" in c for c in made)


def test_wheels_that_are_published_have_what_is_compiled_for_pytorch():
    """For its two newest series, as CMake knows them."""
    text = (WORKFLOWS / "wheels.yml").read_text("utf-8")
    (newest,) = re.findall(
        r"FLASHSDK_NEWEST_TORCH ([\d.]+)", (ROOT / "cmake" / "Torch.cmake").read_text("utf-8")
    )
    major, minor = map(int, newest.split("."))
    assert f"TORCH_SERIES: {major}.{minor - 1} {newest}\n" in text
    assert text.count("scripts/torch_pythons.py /opt/natives $TORCH_SERIES\n") == 2
    made = [c for c in text.splitlines() if "WHEEL_ARGS=" in c]
    assert len(made) == 2 and all("--natives /opt/natives/*/bin/python" in c for c in made)


def test_environments_for_what_is_compiled_for_pytorch(script, monkeypatch, tmp_path):
    """For each Python; without those that pip finds no PyTorch for."""
    module, pythons = script("torch_pythons"), script("pythons")
    python = tmp_path / "python"
    # `python -m venv FOLDER`, for which pip finds one PyTorch.
    python.write_text(
        '#!/bin/sh\nmkdir -p "$3/bin"\ncp "$0.pip" "$3/bin/python"\nchmod +x "$3/bin/python"\n'
    )
    (tmp_path / "python.pip").write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "  *torch==2.13*) exit 0;;\n"
        '  *torch==2.14*) why="No matching distribution found for torch==2.14.*";;\n'
        '  *) why="No space left on device";;\n'
        "esac\n"
        'echo "ERROR: $why" >&2; exit 1\n'
    )
    python.chmod(0o755)
    here = [pythons.Python(series, python) for series in ("3.12", "3.14t")]
    monkeypatch.setattr(module.pythons, "find_all", lambda: here)
    monkeypatch.setattr(sys, "argv", ["torch_pythons.py", f"{tmp_path}/natives", "2.13"])
    module.main()
    sys.argv.append("2.14")
    with pytest.raises(SystemExit, match=r"2\.14: for no Python"):
        module.main()
    sys.argv[2:] = ["2.15"]  # another failure of pip ends it all
    with pytest.raises(SystemExit, match=r"2\.15, Python 3\.12: ERROR: No space left"):
        module.main()
    shutil.rmtree(tmp_path / "natives" / "3.12-2.15")
    made = sorted(file.name for file in (tmp_path / "natives").iterdir())
    assert made == ["3.12-2.13", "3.14t-2.13"]


def write_wheel(file, *names):
    with zipfile.ZipFile(file, "w") as files:
        for name in names:
            files.writestr(name, "")
    return file


ALWAYS = "flashsdk/libflashsdk_jax.so", "flashsdk/licenses/nanobind.txt"


def test_a_wheel_has_the_operators_where_they_are_asked_for(script, tmp_path):
    wheels = script("wheels")
    without = write_wheel(tmp_path / "without.whl", *ALWAYS)
    having = write_wheel(tmp_path / "having.whl", *ALWAYS, wheels.OPERATORS)
    torch_inside = write_wheel(
        tmp_path / "inside.whl", *ALWAYS, wheels.OPERATORS, "flashsdk.libs/libtorch_cpu.so"
    )
    wheels.check_contents(without, 1000, with_operators=False, natives=[])
    wheels.check_contents(having, 1000, with_operators=True, natives=[])
    for wheel, asked in ((without, True), (having, False), (torch_inside, True)):
        with pytest.raises(AssertionError, match=wheel.name):
            wheels.check_contents(wheel, 1000, with_operators=asked, natives=[])


def test_a_wheel_has_what_is_compiled_for_pytorch_where_it_is_asked_for(script, tmp_path):
    """Just these modules: one beside the package would be for the builder's PyTorch alone."""
    wheels = script("wheels")
    asked = [
        f"flashsdk/_torch/2.{n}/_torch_native.cpython-312-x86_64-linux-gnu.so" for n in (13, 14)
    ]
    both = write_wheel(tmp_path / "both.whl", *ALWAYS, *asked)
    one = write_wheel(tmp_path / "one.whl", *ALWAYS, asked[0])
    own = "flashsdk/_torch_native.cpython-312-x86_64-linux-gnu.so"
    more = write_wheel(tmp_path / "more.whl", *ALWAYS, *asked, own)
    wheels.check_contents(both, 2000, with_operators=False, natives=asked[::-1])
    for wheel in (one, more):
        with pytest.raises(AssertionError, match=wheel.name):
            wheels.check_contents(wheel, 2000, with_operators=False, natives=asked)


def test_the_stable_abi_is_asked_of_all_but_what_is_for_one_python(script, monkeypatch, tmp_path):
    wheels = script("wheels")
    seen = []

    def run(tool, *given):
        with zipfile.ZipFile(given[-1]) as files:
            seen.append((tool.name, given[-1].name, sorted(files.namelist())))

    monkeypatch.setattr(wheels, "run", run)
    native = "flashsdk/_torch/2.13/_torch_native.cpython-312-x86_64-linux-gnu.so"
    for tag in ("cp312-abi3", "cp311-cp311"):
        name = f"flashsdk-1.2.3-{tag}-manylinux_2_28_x86_64.whl"
        wheels.check_stable_abi(write_wheel(tmp_path / name, *ALWAYS, native))
    name = "flashsdk-1.2.3-cp312-abi3-manylinux_2_28_x86_64.whl"
    assert seen == [("abi3audit", name, sorted(ALWAYS))]


def test_a_wheel_knows_the_pytorch_of_its_pythons(script, monkeypatch):
    wheels, pythons = script("wheels"), script("pythons")
    monkeypatch.setattr(wheels, "FIND_TORCH", "print('/some/torch')")
    monkeypatch.setattr(wheels, "ASK_NATIVE", "print('2.13.1+cpu .cpython-312.so')")
    native = wheels.native_of(sys.executable)
    assert native.file == "flashsdk/_torch/2.13/_torch_native.cpython-312.so"
    assert wheels.natives_of(None, native.python) == wheels.natives_of([sys.executable], None)
    with monkeypatch.context() as m:
        m.setattr(wheels, "ASK_NATIVE", "print('2.14.0.dev20260401+cpu .cpython-312.so')")
        assert wheels.natives_of(None, native.python) == []
    monkeypatch.setattr(wheels, "FIND_TORCH", "raise SystemExit(1)")
    with pytest.raises(SystemExit, match=r"--natives: .*python.* has no PyTorch"):
        wheels.native_of(sys.executable)
    of = {series: pythons.Python(series, Path("python")) for series in pythons.SERIES}
    served = {s: [o for o in of if wheels.serves(of[s], of[o])] for s in of}
    assert served["3.10"] == ["3.10"] and served["3.14t"] == ["3.14t"]
    assert served["3.12"] == ["3.12", "3.13", "3.14"]


def test_a_python_without_pytorch_has_no_operators(script, monkeypatch):
    wheels = script("wheels")
    monkeypatch.setattr(wheels, "FIND_TORCH", "raise SystemExit(1)")
    assert wheels.python_with_torch(None) is None
    with pytest.raises(SystemExit, match=r"--torch: .*python.* has no PyTorch"):
        wheels.python_with_torch(sys.executable)
    monkeypatch.setattr(wheels, "FIND_TORCH", "print('/some/torch')")
    found = wheels.python_with_torch(sys.executable)
    assert found and wheels.torch_folder(found.path) == Path("/some/torch")


def test_the_record_of_a_wheel(script, tmp_path):
    wheels, pythons = script("wheels"), script("pythons")
    name = "flashsdk-1.2.3-cp312-abi3-manylinux_2_28_x86_64.whl"
    wheel = write_wheel(tmp_path / name, "a")
    assert wheels.entry(wheel, pythons.Python("3.13", Path("python")), 12.34) == {
        "name": name,
        "bytes": wheel.stat().st_size,
        "tag": "manylinux_2_28_x86_64",
        "python": "3.13",
        "seconds": 12.3,
    }


def test_what_ptxas_says_is_read(script):
    printed = """\
ptxas info    : Compiling entry function '_Zone' for 'sm_86'
ptxas info    : Function properties for _Zone
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 254 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compile time = 9.2 ms
ptxas info    : Compiling entry function '_Ztwo' for 'sm_86'
ptxas info    : Function properties for _Ztwo
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 4096 bytes smem
ptxas info    : Compiling entry function '_Zone' for 'sm_120'
ptxas info    : Function properties for _Zone
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 0 barriers
"""
    found = script("check_architectures").read(printed)
    assert found == {"sm_86": [(254, 12, 0), (40, 0, 4096)], "sm_120": [(96, 0, 0)]}


def test_cells_are_pythons_by_frameworks(script):
    """Each Python that wheels are for and CI has, with the oldest and newest of all else."""
    command = [sys.executable, "scripts/test_versions.py", "--list"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    cells = [dict(p.partition("==")[::2] for p in cell.split(",")) for cell in json.loads(printed)]
    pythons = {cell["python"] for cell in cells}
    assert pythons <= set(script("pythons").SERIES)
    assert {"3.10", "3.14t"} <= pythons
    for python in pythons:
        own = [c for c in cells if c["python"] == python and "torch" in c]
        assert len({(bool(c["torch"]), bool(c["numpy"])) for c in own}) == 4, python
    assert any("torch" not in c for c in cells) and any("jax" in c for c in cells)


def test_one_wheel_serves_the_stable_abi(script):
    """One for each Python below 3.12 and each without a lock, and one for all others."""
    wheels, pythons = script("wheels"), script("pythons")
    built: list = []
    for series in pythons.SERIES:
        python = pythons.Python(series, Path("python"))
        if not wheels.is_built_for(python, built):
            built.append(python)
    assert [python.series for python in built] == ["3.10", "3.11", "3.12", "3.14t"]


def test_a_version_may_get_a_local_part(script, tmp_path):
    """Of pyproject.toml in a copy of the sources; CMake reads the numbers before it."""
    wheels = script("wheels")
    (tmp_path / "in" / "flashsdk").mkdir(parents=True)
    settings = tmp_path / "in" / "flashsdk" / "pyproject.toml"
    settings.write_text('version = "1.2.3"\nminimum-version = "0.11"\n')
    archive = tmp_path / "sources.tar.gz"
    subprocess.run(["tar", "czf", archive, "-C", tmp_path / "in", "flashsdk"], check=True)
    sources = wheels.unpacked(archive, tmp_path / "out", "cu130")
    text = (sources / "pyproject.toml").read_text()
    assert text == 'version = "1.2.3+cu130"\nminimum-version = "0.11"\n'
