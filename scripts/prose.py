"""How long the sentences of the pages are: mean words a sentence, and the share above 35 words.

    python scripts/prose.py                 # README.md and docs/**/*.md
    python scripts/prose.py docs/masks.md   # these pages

Prose alone counts: no headings, tables, code, pictures or comments. A list item is a sentence
of its own. Ends with 1 if the mean of a page is 25 words or more. Logs in docs/dev are listed, and
exempt.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEAN = 25  # words a sentence: a page's mean is below
LONG = 35
EXEMPT = ("docs/dev/log-*.md",)

FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
NO_PROSE = re.compile(r"\s*(#|\||!\[| {4}\S)")  # headings, tables, pictures, indented code
ITEM = re.compile(r"\s*([-*+]|\d+\.) ")
# A full stop ends a sentence, but one behind an abbreviation.
END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<! al)(?<! vs)[.!?][)\"”*`]*\s+")


def paragraphs(text: str) -> list[str]:
    """The prose of a page, a paragraph or a list item each."""
    text = COMMENT.sub("", FENCED.sub("", text))
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        inside_item = line.startswith("  ") and bool(found[-1])
        if not line.strip() or (NO_PROSE.match(line) and not inside_item):
            found.append([])
        elif item := ITEM.match(line):
            found.append([line[item.end() :]])
        else:
            found[-1].append(line)
    return [" ".join(" ".join(lines).split()) for lines in found if lines]


def sentences(paragraph: str) -> list[str]:
    return [part for part in END.split(paragraph) if words(part)]


def words(sentence: str) -> int:
    """Code in backticks is one word, so is a link's text or address; signs alone are none."""
    sentence = re.sub(r"`[^`]*`", "code", sentence)
    sentence = re.sub(r"\]\([^)]*\)", "]", sentence)
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def measure(text: str) -> tuple[int, float, float]:
    """(sentences, mean words of one, share of them above LONG words)"""
    counts = [words(s) for paragraph in paragraphs(text) for s in sentences(paragraph)]
    if not counts:
        return 0, 0.0, 0.0
    return len(counts), statistics.mean(counts), sum(n > LONG for n in counts) / len(counts)


def is_exempt(page: Path) -> bool:
    return page.is_relative_to(ROOT) and any(page.relative_to(ROOT).match(p) for p in EXEMPT)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path)
    pages = parser.parse_args().pages or [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    too_long = 0
    print(f"{'sentences':>9} {'mean':>6} {f'> {LONG}':>6}  page")
    for page in map(Path.resolve, pages):
        count, mean, share = measure(page.read_text("utf-8"))
        exempt, over = is_exempt(page), mean >= MEAN
        too_long += over and not exempt
        note = " (exempt)" if exempt else f" ✗ {MEAN} or more" if over else ""
        name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
        print(f"{count:9} {mean:6.1f} {100 * share:5.0f}%  {name}{note}")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
