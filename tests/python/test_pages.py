"""README.md and docs/: links lead somewhere, code runs, commands exist."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = ("benchmarks", "cmake", "cpp", "examples", "python", "scripts", "tests")
ENDINGS = {".py", ".h", ".cpp", ".cu", ".cmake", ".in", ".md", ".txt"}
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)

if not DOCS.exists():
    pytest.skip("not a checkout", allow_module_level=True)


def pages() -> list[Path]:
    """All that is written to be read: of the root, of docs/ and of the folders of programs."""
    folders = ("benchmarks", "examples", "docs")
    return sorted([*ROOT.glob("*.md"), *(p for f in folders for p in ROOT.glob(f"{f}/**/*.md"))])


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text("utf-8"))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, where GitHub and the site agree."""
    found = set()
    for heading in re.findall(r"^#+ (.*)", prose(page), re.MULTILINE):
        text = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        site = re.sub(r"[-\s]+", "-", text)
        if text.isascii() and site == text.replace(" ", "-"):
            found.add(site)
    return found


def links() -> Iterator[tuple[Path, str]]:
    for page in pages():
        for target in re.findall(r"\]\(([^)\s]*)\)", prose(page)):
            if not target.startswith(("https://", "mailto:")):
                yield page, target


def test_links_lead_to_files_and_headings():
    found = list(links())
    assert len(found) > 50
    for page, target in found:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        where = f"{page.relative_to(ROOT)}: {target}"
        assert file.is_file(), where
        assert not anchor or anchor in anchors(file), where


def test_pages_of_the_site_link_inside_it():
    """What lies outside of docs/ is on no site: pages name it as code."""
    for page, target in links():
        if page.is_relative_to(DOCS):
            file = (page.parent / target.partition("#")[0]).resolve()
            assert file.is_relative_to(DOCS), f"{page.relative_to(ROOT)}: {target}"


def test_pages_that_sources_name_exist():
    named = set()
    files = [p for folder in SOURCES for p in (ROOT / folder).rglob("*") if p.suffix in ENDINGS]
    for file in [*files, *ROOT.glob("*.md"), *ROOT.glob("*.toml"), *DOCS.rglob("*.md")]:
        found = re.findall(r"\bdocs/[\w./-]+\.md\b", file.read_text("utf-8"))
        named |= {(file.relative_to(ROOT), page) for page in found}
    assert len(named) > 20
    assert not [(str(f), page) for f, page in named if not (ROOT / page).is_file()]


def test_files_that_pages_name_exist():
    """In backticks, with stars where several are meant. Logs name what there was then."""
    folder = "|".join((*SOURCES, "third_party"))
    named = {
        (page, name)
        for page in pages()
        if not page.name.startswith("log-")
        for name in re.findall(rf"`((?:{folder})/[\w./*-]*)`", prose(page))
    }
    assert len(named) > 50
    assert not [(str(page), name) for page, name in named if not any(ROOT.glob(name))]


def test_every_page_is_reached():
    """From the README, by links alone."""
    reached, open_pages = set(), [ROOT / "README.md"]
    targets: dict[Path, list[str]] = {}
    for page, target in links():
        targets.setdefault(page, []).append(target)
    while open_pages:
        page = open_pages.pop()
        reached.add(page)
        for target in targets.get(page, []):
            file = (page.parent / target.partition("#")[0]).resolve()
            if file.suffix == ".md" and file not in reached:
                open_pages.append(file)
    missing = set(DOCS.rglob("*.md")) - reached - {DOCS / "package.md"}
    assert not {str(page.relative_to(ROOT)) for page in missing}


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text("utf-8")
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found
    return found


@pytest.mark.parametrize(
    "page, packages",
    [
        ("quickstart.md", ("torch", "jax")),
        ("masks.md", ("matplotlib",)),
        ("varlen.md", ("torch",)),
        ("jax_details.md", ("jax",)),
        ("serving.md", ("torch", "jax", "transformers")),
    ],
)
def test_python_runs(page, packages, tmp_path, monkeypatch):
    """One block after another, as a reader would type them."""
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_cpp_compiles(tmp_path):
    """In the C++17 that the public headers promise. The version's header is the build's."""
    (example,) = blocks("quickstart.md", "cpp")
    (tmp_path / "flashsdk").mkdir()
    (tmp_path / "flashsdk" / "version.h").touch()
    program = tmp_path / "main.cpp"
    program.write_text(example)
    command = [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    includes = [f"-I{ROOT / 'cpp' / 'include'}", f"-I{tmp_path}"]
    done = subprocess.run([*command, *includes, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_c_compiles(tmp_path):
    (example,) = blocks("c.md", "c")
    (tmp_path / "flashsdk").mkdir()
    (tmp_path / "flashsdk" / "version.h").touch()  # the build's
    (tmp_path / "example.c").write_text(example)
    command = [COMPILER, "-x", "c", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    includes = [f"-I{ROOT / 'cpp' / 'include'}", f"-I{tmp_path}"]
    done = subprocess.run(
        [*command, *includes, "-fsyntax-only", tmp_path / "example.c"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_commands_of_make_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (str(page.relative_to(ROOT)), target)
        for page in pages()
        for target in re.findall(
            r"(?:^|`)make ([a-z][\w-]*)", page.read_text("utf-8"), re.MULTILINE
        )
    }
    assert len(named) > 10
    assert not {(page, target) for page, target in named if target not in targets}


def test_the_site_shows_every_page():
    """make site fails too, where it is installed."""
    shown = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
