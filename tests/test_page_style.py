"""Length of README.md and of the pages for users: lines, words, and words per sentence."""

import re
from pathlib import Path

import pytest
from test_docs import ROOT
from test_text import BLOCK, MADE

#: Pages that are no user documentation: test logs and what the Contributing part of the site shows.
CONTRIBUTING = {"tests_on_gpus.md", "versions_tested.md", "inputs.md", "inputs_commands.md"}
#: Pages of the Benchmarks part, which have a limit of their own.
BENCHMARKS = {"numbers.md"}
MAX_README_LINES = 110
MAX_FIRST_SCREEN_LINES = 42
MAX_WORDS_A_SENTENCE = 25
MAX_USER_WORDS = 12_000


def prose(page: Path) -> str:
    """Return a page without generated parts, blocks of code, and targets of links."""
    text = BLOCK.sub("", MADE.sub("", page.read_text()))
    return re.sub(r"\]\([^)\s]+\)", "]", text)


def words(text: str) -> int:
    return len(re.findall(r"\S*\w\S*", text))


def user_pages() -> list[Path]:
    """Return README.md, SECURITY.md and the pages of docs/ for users."""
    docs = ROOT / "docs"
    own = [page for page in docs.glob("*.md") if page.name not in CONTRIBUTING | BENCHMARKS]
    below = [page for page in docs.glob("*/*.md") if page.parent.name != "benchmarks"]
    return [ROOT / "README.md", ROOT / "SECURITY.md", *sorted(own), *sorted(below)]


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page's paragraphs and list items; tables and headings have none."""
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose(page)):
        lines = [line for line in paragraph.splitlines() if not line.startswith(("|", "#"))]
        text = " ".join(lines).strip()
        found += [sentence for sentence in re.split(r"(?<=[.:;!?])\s+", text) if words(sentence)]
    return found


def test_readme_has_two_screens_and_the_first_one_decides():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= MAX_README_LINES
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120
    first_screen = "\n".join(lines[:MAX_FIRST_SCREEN_LINES])
    for needed in ("never run on several GPUs", "holmes : stock", "| your setup |", "| no |"):
        assert needed in first_screen
    assert "\n## " not in first_screen.partition("| no |")[0]


@pytest.mark.parametrize("page", user_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short_on_average(page):
    found = sentences(page)
    if found:
        assert sum(map(words, found)) / len(found) <= MAX_WORDS_A_SENTENCE


def test_user_pages_are_short_in_total():
    assert sum(words(prose(page)) for page in user_pages()) <= MAX_USER_WORDS
