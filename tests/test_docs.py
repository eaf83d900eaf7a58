"""README.md and docs/: what they link to and name is there, and no flag or command is left out."""

import re
from pathlib import Path

import pytest

from holmes_ext.cli.main import COMMANDS
from holmes_ext.options import NAMES, flag

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "benchmarks", "examples", "integration_tests")
PAGES = [ROOT / "README.md", *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = r"(?:holmes_ext|patches|tests|integration_tests|benchmarks|examples|docs)/[\w./-]*\w"
PLACE = re.compile(rf"(?<![\w./-])((?:\.\./)*{FILE})")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_and_names_is_there(page):
    text = page.read_text()
    for target in LINK.findall(text):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target
    for place in PLACE.findall(text):
        assert (ROOT / place).exists() or (page.parent / place).exists(), place


def test_the_readme_is_two_screens_and_says_in_its_third_line_what_was_not_run():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130 and max(map(len, lines)) <= 120
    assert "not run on a GPU" in lines[2]


def test_every_page_is_linked_from_the_readme():
    linked = LINK.findall((ROOT / "README.md").read_text())
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(linked)


def test_every_flag_and_every_command_is_listed():
    text = (ROOT / "docs" / "flags.md").read_text()
    assert not [name for name in NAMES if f"| `{flag(name)}" not in text]
    assert not [name for name in COMMANDS if f"| `holmes {name}" not in text]
