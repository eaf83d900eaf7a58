"""Facts on pages that the code, the Makefile or the workflows decide: each is compared with its source."""

import ast
import re
import sys

import pytest
import yaml
from packaging.version import Version
from test_docs import PAGES, ROOT, anchors, generate
from test_text import MADE

import holmes_ext
from holmes_ext.cli.main import commands, main, parser_of
from holmes_ext.join import CA_HELP, CERTIFICATE_HELP
from holmes_ext.options import names
from holmes_ext.patches import all_patches

sys.path.insert(0, str(ROOT / "benchmarks"))
import matrix_rows  # noqa: E402
import matrix_table  # noqa: E402

ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
CODE = [
    path
    for folder in ("holmes_ext", "patches", "lab", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if (ROOT / "holmes_ext" / "patches") not in path.parents
]
DOCS_PAGE = re.compile(r"(?<![\w./-])(?<!topograph )docs/([\w./-]+\.md)(?:#([\w-]+))?")
TABLE = re.compile(r"^\|(.*)\|\n\|(?: *:?-+:? *\|)+$", re.MULTILINE)
#: Packages whose oldest supported release was neither run nor read: Megatron-LM 0.14, 0.15 (tried: 0.16.1).
NOT_AT_THE_OLDEST = {"megatron-lm"}
#: Package, as pages call it -> a feature of holmes that needs it.
FEATURE_OF = {
    "torch": "ddp",
    "deepspeed": "overlap",
    "megatron-core": "megatron-layers",
    "lightning": "lightning-ranks",
    "transformers": "joined-transformers",
}
FEATURES = {patch.feature.name: patch.feature for patch in all_patches()}


def text_of(name):
    return (ROOT / name).read_text()


# Python


def test_all_name_the_same_versions_of_python():
    pythons = generate.pythons()
    first, last = pythons[0], pythons[-1]
    workflow = yaml.safe_load(text_of(".github/workflows/test.yml"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == pythons
    assert f'requires-python = ">={first}"' in text_of("pyproject.toml")
    for page in ("CONTRIBUTING.md", "Makefile"):
        ranges = re.findall(r"Python (3\.\d+) to (3\.\d+)", text_of(page))
        assert ranges and set(ranges) == {(first, last)}, page


# CONTRIBUTING.md


def test_contributing_names_what_ci_runs():
    goals = re.findall(r"\bmake ([a-z][\w-]*)", re.sub(r"#.*", "", text_of(".ci/run")))
    written = re.search(r"`\.ci/run` runs (.*?) on a fresh machine", text_of("CONTRIBUTING.md"))
    named = re.findall(r"`make (\w+)`", written[1])
    assert set(named) <= set(goals)
    # The others prepare or report, or are a part of `make test`.
    assert set(goals) - set(named) <= {"checkouts", "gpu-libraries", "unit", "summary"}


def test_make_unit_needs_what_its_goal_requires():
    goal = re.search(r"^unit: (.*)$", text_of("Makefile"), re.MULTILINE)[1]
    assert "tools" in goal.split()
    for page in ("Makefile", "CONTRIBUTING.md"):
        line = re.search(r".*make unit.*", text_of(page))[0]
        assert "namespaces" in line and "no emulated network" not in line, page


@pytest.mark.parametrize(
    "page", [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "frameworks" / "torchtitan.md"]
)
def test_pytest_commands_select_tests(page):
    """Their paths exist, and the word after -k is in the name of a test or of a row's case."""
    commands = re.findall(r"^    .*pytest ([^#\n]*)", page.read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        paths = [ROOT / word for word in command.split() if "tests" in word]
        assert paths and all(path.exists() for path in paths), command
        for word in re.findall(r"-k (\w+)", command):
            files = [
                file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])
            ]
            assert any(re.search(rf'(def test_\w*|"){word}', file.read_text()) for file in files), (
                command
            )


def test_contributing_names_every_public_name():
    contract = text_of("CONTRIBUTING.md").partition("## The contract")[2]
    assert [name for name in holmes_ext.__all__ if f"`{name}`" not in contract] == []


def test_every_name_that_can_be_imported_is_public():
    assert {*holmes_ext._MODULE_OF, "initialize_model_parallel"} == set(holmes_ext.__all__)
    with pytest.raises(AttributeError):
        _ = holmes_ext.enable_on_nodes


# Versions


def test_the_oldest_release_of_each_range_was_run_or_read():
    """Patches with `only` are left out: the oldest releases do not have the functions that they change."""
    for feature in {patch.feature for patch in all_patches() if not patch.only}:
        if feature.requirement.name in NOT_AT_THE_OLDEST:
            continue
        oldest = min(map(Version, (*feature.tried, *feature.read)))
        bounds = [
            Version(part.version) for part in feature.requirement.specifier if part.operator == ">="
        ]
        for bound in bounds:
            assert oldest.release[:2] == bound.release[:2], feature


@pytest.mark.parametrize("page", ALL_PAGES[:-1], ids=lambda page: str(page.relative_to(ROOT)))
def test_a_range_of_versions_on_a_page_was_tried(page):
    """In "deepspeed 0.16 to 0.19", both are releases with which holmes was run."""
    for package, name in FEATURE_OF.items():
        feature = FEATURES[name]
        releases = [*feature.tried, *feature.read]
        for found in re.finditer(
            rf"\b{package}(?:\*\*)? (\d+\.[\d.]*\d) to (\d+\.[\d.]*\d)", page.read_text()
        ):
            for end in found.groups():
                assert any(f"{version}.".startswith(f"{end}.") for version in releases), found[0]


def releases_that_were_tried():
    """Return package -> its releases in features of holmes, rows of the matrix and requirements.

    torchtitan has no feature: its test names the releases with which it was run.
    """
    found = {"torchtitan": set()}
    for patch in all_patches():
        feature = patch.feature
        releases = found.setdefault(feature.requirement.name, set())
        releases |= {*feature.tried, *feature.read}
    requirements = [path.read_text() for path in (ROOT / "requirements").glob("*.txt")]
    for row in matrix_rows.ROWS.values():
        requirements += [row.torch, *row.packages]
    for package, release in re.findall(r"([\w-]+)==(\d[\d.]*\d)", "\n".join(requirements)):
        found.setdefault(package, set()).add(release)
    text = text_of("integration_tests/stacks/test_torchtitan.py").partition("import re")[0]
    found["torchtitan"] |= set(re.findall(r"^    (\d[\d.]*) ", text, re.MULTILINE))
    return found


TRIED = releases_that_were_tried()


#: Pages for users; the log of the matrix also has releases that ran once.
USER_PAGES = [page for page in ALL_PAGES[:-1] if page.name != "versions_tested.md"]


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_release_on_a_page_was_tried(page):
    """In "deepspeed 0.19.8"; not in "deepspeed 0.19.7 or newer", "before" and code such as `torch 9`."""
    text = re.sub(r"`[^`\n]*(\n[^`\n]+)?`", "", MADE.sub("", page.read_text()))
    for package, releases in TRIED.items():
        pattern = (
            rf"(?<!before )(?<![\w-]){package} ((?:\d+\.){{2}}\d+(?:(?:, | and )(?:\d+\.){{2}}\d+)*)"
            r"(?! (?:or|and) (?:newer|older))"
        )
        for found in re.finditer(pattern, text, re.IGNORECASE):
            assert set(re.split(", | and ", found[1])) <= releases, found[0]


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_on_a_page_installs_a_release_that_was_tried(page):
    text = MADE.sub("", page.read_text())
    for package, release in re.findall(r"(?<![\w-])([\w-]+)==(\d[\d.]*\d)", text):
        assert release in TRIED.get(package, {release}), (package, release)


def test_one_page_has_all_releases_that_trained():
    """The table is made of what the features declare; the commit is that of the matrix."""
    table = generate.trained()
    assert "0.17.6" in table and "4.57.1" in table and table in text_of("docs/versions.md")
    for commit in generate.UNRELEASED.values():
        hashed = re.search(r"[0-9a-f]{8}", commit)[0]
        assert any(hashed in title for title in matrix_table.TITLES.values())


def test_a_commit_that_is_not_released_is_called_one():
    for page in (ROOT / "README.md", ROOT / "docs" / "versions.md"):
        for line in page.read_text().splitlines():
            if "0.20.0" in line and "megatron-core" in line:
                assert "unreleased" in line, (page, line)
    assert "unreleased" in matrix_table.TITLES["megatron-core 0.20.0"]


def test_the_image_of_the_dockerfile_is_one_that_was_tried():
    tag = re.search(r"pytorch:(\d\d\.\d\d)-py3", text_of("examples/kubernetes/Dockerfile"))[1]
    assert f"NVIDIA's {tag} container" in matrix_table.ROWS


# Flags, commands and statuses


def test_each_flag_is_in_one_group():
    groups = [
        name for group in ("common", "tuning", "joined") for name in generate.names_of_group(group)
    ]
    assert sorted(groups) == sorted(names())


def test_what_follows_a_default_stays_in_the_table():
    assert "(0: no limit)" in generate.flags("common")
    assert generate._without_default("seconds (default 20; 0: none)") == "seconds (0: none)"
    assert generate._without_default("seconds (default: 20)") == "seconds"


def test_the_page_of_commands_shows_what_help_prints():
    page = generate.commands()
    assert not re.findall(r"^\| `[^`]*\('[^`]*` \|", page, re.MULTILINE), "a tuple of Python"
    for name in commands():
        top = parser_of(name)
        for parser in {top, *generate._parsers(top)}:
            for line in (parser.epilog or "").replace("%%", "%").splitlines():
                assert line in page, (parser.prog, line)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("N (default: 5)", "N (default: `5`)"),
        ('S (default: "16GiB"); more', "S (default: `16GiB`); more"),
        ("P (default: 29600; 0: any)", "P (default: `29600`; 0: any)"),
        ("S (default: every=32,delay=5,...)", "S (default: `every=32,delay=5,...`)"),
        ("N (default: the file's)", "N (default: the file's)"),
        ("S (default: 16 MiB)", "S (default: 16 MiB)"),
    ],
)
def test_a_default_is_code_and_words_are_not(text, shown):
    assert generate._with_default_as_code(text) == shown


def test_every_status_that_a_help_text_names_is_in_the_table():
    named = set()
    for name in commands():
        top = parser_of(name)
        for parser in {top, *generate._parsers(top)}:
            texts = [parser.description, parser.epilog, *(a.help for a in parser._actions)]
            for text in filter(None, texts):
                named |= (
                    set(re.findall(r"\b(12\d|130)\b(?!\.)", text)) if "tatus" in text else set()
                )
    assert {"124", "125", "130"} <= named
    table = generate.statuses()
    assert [status for status in named if f"| {status} |" not in table] == []


def test_ctrl_c_ends_a_command_with_the_status_of_the_table(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("holmes_ext.cli.main._run_command", interrupt)
    assert f"| {main(['patches'])} | Ctrl-C" in generate.statuses()


def test_a_certificate_is_described_once():
    page = text_of("docs/commands.md") + text_of("docs/flags.md")
    for option, text in (("certificate", CERTIFICATE_HELP), ("ca", CA_HELP)):
        lines = re.findall(rf"^\| `--(?:holmes-join-)?{option}\b.*$", page, re.MULTILINE)
        assert len(lines) == 3 and all(text in line for line in lines)


def test_doctor_says_that_it_may_run_on_other_nodes():
    about = parser_of("doctor").description
    assert "--slurm" in about and "Nothing is started" not in about


def test_pages_name_the_minutes_of_the_demo_that_its_help_names():
    minutes = re.search(r"takes (.+? minutes)", " ".join(parser_of("demo").description.split()))[1]
    for page in ALL_PAGES[:-1]:
        for named in re.findall(r"`(?:make|holmes) demo` takes (.+? minutes)", page.read_text()):
            assert named == minutes, page


# Pages


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_have_headers(page):
    text = page.read_text()
    for head in TABLE.findall(text):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", head)]
        assert all(cells), head


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_that_code_names_are_there(path):
    """In messages, help texts and docstrings: docs/PAGE.md, and docs/PAGE.md#ANCHOR."""
    if "docs/" not in path.read_text():
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for page, anchor in DOCS_PAGE.findall(node.value):
                file = ROOT / "docs" / page
                assert file.exists(), (node.lineno, page)
                assert not anchor or anchor in anchors(file), (node.lineno, page, anchor)


def test_links_to_a_folder_of_tests_name_it():
    """The text `integration_tests/FOLDER` of a link leads there."""
    for page in ALL_PAGES[:-1]:
        for shown, target in re.findall(r"\[`([\w/]+/[\w/.]+)`\]\(([^)\s]+)\)", page.read_text()):
            assert target.partition("#")[0].endswith(shown.strip("/")), (page, shown, target)
