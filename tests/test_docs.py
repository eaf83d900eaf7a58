"""README.md and docs/: what they link to and name is there, and no flag or command is left out."""

import importlib.util
import re
from pathlib import Path

import pytest

from holmes_ext.cli.main import commands as all_commands
from holmes_ext.options import flag, names, variable
from holmes_ext.planner.search.result import OptimalityGap

ROOT = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(generate)
FOLDERS = ("docs", "benchmarks", "examples", "integration_tests")
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))),
]
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
        if "NAME" in place:  # a pattern
            continue
        assert (ROOT / place).exists() or (page.parent / place).exists(), place


def test_every_page_is_reached_from_the_readme():
    """By links from page to page; the site's navigation has all pages, too."""
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for target in LINK.findall(page.read_text()):
            linked = (page.parent / target.partition("#")[0]).resolve()
            if linked.suffix == ".md" and linked.exists() and linked not in reached:
                waiting.append(linked)
    assert set((ROOT / "docs").rglob("*.md")) <= reached


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: page.name)
def test_what_is_generated_is_what_the_code_and_the_results_say(page):
    """The generated blocks agree with the code and the results.

    These are flags, variables, features, commands, keys, metrics, the list of public names,
    README's figures and the output of commands.
    """
    text = page.read_text()
    way_out = (
        ".venv/bin/python docs/generate.py writes it; a change of docs/public.md belongs into "
        "CHANGELOG.md, too"
    )
    assert generate.renewed(text) == text, way_out


def test_optimality_gaps_name_the_worst_error_that_was_measured():
    assert generate.MODEL_ERROR.read_text() == generate.tables.model_error_file(), (
        ".venv/bin/python docs/generate.py"
    )
    _, worst = generate.tables.worst_error()
    assert f"{worst:.1%}" in str(OptimalityGap(2.0, 1.0)) and f"{worst:.1%}" in str(
        OptimalityGap(1.0, 1.0)
    )
    page = (ROOT / "docs" / "plan_search.md").read_text()
    assert generate.tables.model_error() in page.replace("\n", " ")


def test_every_flag_and_every_command_is_listed():
    flags, commands = ((ROOT / "docs" / name).read_text() for name in ("flags.md", "commands.md"))
    assert not [
        name
        for name in (*map(flag, names()), *map(variable, names()))
        if f"| `{name}`" not in flags
    ]
    assert not [name for name in all_commands() if f"\n## holmes {name}" not in commands]


def test_every_block_is_on_a_page_and_every_page_in_the_site():
    texts = "".join(page.read_text() for page in generate.pages())
    assert not [
        name for name in generate.BLOCKS if not re.search(f"<!-- generated: {name}[ >]", texts)
    ]
    listed = set(
        re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    )
    docs = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    outside = {"index.md", "results.md", "security.md", "contributing.md", "changelog.md"}
    assert listed == docs | outside


#: Words that a newcomer does not know -> where they are explained.
TERMS = {
    "span": r"\bspan(s|ning|ned)? (clusters|networks)\b",
    "closed-form": r"closed form\w*",
    "hierarchical-all-reduce": r"[Hh]ierarchical all-reduce",
    "optimality-gap": r"[Oo]ptimality gap",
}


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: page.name)
def test_the_first_use_of_a_hard_word_is_linked(page):
    text = re.sub(r"<!-- generated.*?<!-- /generated -->", "", page.read_text(), flags=re.DOTALL)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    for anchor, pattern in TERMS.items() if page.name != "glossary.md" else ():
        first = re.search(pattern, prose)
        link = re.search(rf"\[[^\]]*\]\((docs/|\.\./)?glossary.md#{anchor}\)", prose)
        assert not first or link and link.start() < first.end() < link.end(), (anchor, first)
