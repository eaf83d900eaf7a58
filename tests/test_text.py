"""Every block of README.md and docs/ that is neither generated nor run.

Its commands are known, its flags exist, and its lines "holmes: ..." are messages of the source.
Other blocks stand in KEPT, with the reason.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Sequence
from functools import cache

import pytest
from test_docs import ROOT, generate

from holmes_ext.cli.main import commands, parser_of
from holmes_ext.options import flag, names, variable, variables

MADE = re.compile(r"<!-- (generated|run|lab|matrix)\b.*?<!-- /\1 -->", re.DOTALL)
#: Between lines of ```, or indented, up to an empty line.
BLOCK = re.compile(r"^```\w*\n.*?^```$|(?:^    +\S[^\n]*\n)+", re.MULTILINE | re.DOTALL)
#: (page, how the block begins) -> why its text stands as it is.
KEPT = {
    ("docs/start.md", "A GPT (6.15 M parameters"): "what make demo prints: two minutes in the lab",
    ("docs/start.md", "run          step, s"): "the same",
    ("docs/start.md", "Step times are emulated"): "the same",
    ("docs/first_run.md", "for turn in 1 2 3; do"): "a loop of the shell",
    ("docs/joined_network.md", "--holmes-join-ports"): "flags, each with what it means",
    ("docs/joined_network.md", "--holmes-join-certificate"): "the same, and commands",
    (
        "docs/joined.md",
        "joined jobs instead (docs/joined.md)",
    ): "the end of what the command above it prints",
    ("docs/check.md", "predicted step:"): "answers of a report: tests/planner/check",
    (
        "docs/check.md",
        "torchrun     ...",
    ): "what launchers print: integration_tests/launchers/checks.py",
    ("docs/joined.md", "job   from, s"): "what holmes demo --joined prints: 2.5 minutes in the lab",
    (
        "docs/trouble.md",
        "node  fast NICs",
    ): "holmes doctor over four nodes: tests/doctor/test_side_by_side.py",
    ("docs/trouble.md", "Collective sequence number"): "what torchfrtrace prints: "
    "integration_tests/gpu/test_lost.py runs it",
    (
        "docs/clusters.md",
        "version = 2",
    ): "a cluster.toml: tests/cluster/test_spec.py reads one with these keys",
    ("docs/clusters.md", "[[between]]"): "the same",
    ("docs/clusters.md", 'gpu = "X1000"'): "the same",
    ("docs/schedulers/slurm.md", "holmes discover: cluster.toml"): "the command's: "
    "tests/cli/test_discover_from.py",
    ("docs/schedulers/mpi.md", "ib01 slots=8"): "a hostfile",
    ("docs/fabric_constraints.md", "SwitchName=ib"): "a topology.conf of Slurm",
    ("docs/fabric_constraints.md", "#SBATCH --nodes=6"): "lines of a batch script: "
    "examples/slurm/megatron_lm_het.sbatch has them",
    ("docs/fabric_constraints.md", "srun: error:"): "what Slurm 22.05.8 prints in the lab with it",
    ("docs/cross_datacenter.md", "[[between]]"): "a part of a cluster.toml: "
    "examples/clusters/two_cities_1024.toml has it",
    ("docs/nccl_variables.md", "problem: NCCL_IB_HCA"): "holmes doctor's: "
    "tests/doctor/test_nccl_names.py",
    (
        "docs/frameworks/megatron_lm.md",
        "from holmes_ext import initialize_model_parallel",
    ): "a program: integration_tests/rows/megatron_core_call.py calls the function",
    ("docs/how.md", "cluster  ->  plan"): "a picture",
    (
        "docs/check.md",
        "who runs where",
    ): "what a checked job prints: integration_tests/commands/test_check.py reads such a report",
    ("docs/numbers.md", '{"machine": ...'): "a form: benchmarks/harness.py writes it",
}
#: Programs of others in commands, whose own options nobody here knows.
OTHERS = {
    "git",
    "cd",
    "pip",
    "curl",
    "srun",
    "torchrun",
    "deepspeed",
    "accelerate",
    "mpirun",
    "export",
    ".",
    "bash",
    "hostname",
    "apt-get",
    "grep",
    "sed",
    "sinfo",
    "sbatch",
    "kubectl",
    "docker",
    "torchfrtrace",
}


def blocks(text: str) -> list[list[str]]:
    """Return the lines of each block of a page, without generated blocks.

    A line that goes on is one line.
    """
    return [lines_of(found[0]) for found in BLOCK.finditer(MADE.sub("", text))]


def lines_of(block: str) -> list[str]:
    text = re.sub(r"^```\w*$", "", block, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip()]


@cache
def messages() -> set[tuple[str, str]]:
    """Return every text of the source that has enough words to be recognized.

    Each has its longest part, and its pattern, in which anything may stand for a value that is
    filled in.
    """
    found = set()
    for path in [*(ROOT / "holmes_ext").rglob("*.py"), *(ROOT / "patches").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            parts = (
                node.values
                if isinstance(node, ast.JoinedStr)
                else [node]
                if isinstance(node, ast.Constant)
                else []
            )
            texts = [str(part.value) if isinstance(part, ast.Constant) else "" for part in parts]
            if sum(map(len, texts)) >= 12:
                found.add((max(texts, key=len), "".join(re.escape(text) or ".*" for text in texts)))
    return found


def said(line: str) -> bool:
    """Return whether holmes can print this line, or whole parts of it.

    More than half of it must be messages of the source.
    """
    text, known = line.removesuffix("...").strip(), set()
    for part, pattern in messages():
        if part in text and (match := re.search(pattern, text)):
            known |= set(range(*match.span()))
    return len(known) > len(text) / 2


@cache
def options(command: str) -> set[str]:
    """Of a `holmes` command with all its actions."""
    return {
        word
        for parser in generate._parsers(parser_of(command))
        for one in parser._actions
        for word in one.option_strings
    }


def wrong(line: str) -> str:
    """Return what is wrong with a command.

    "" when nothing is, "not a command" for other text.
    """
    try:
        words = shlex.split(re.sub("[<>]", "", line), comments=True)
    except ValueError:
        return "not a command"
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    head = words[0] if words else ""
    own, theirs = (
        (words[: words.index("--")], words[words.index("--") :]) if "--" in words else (words, [])
    )
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    for name in flags & {word for word in flags if word.startswith("--holmes")} - {"--holmes"}:
        if name not in map(flag, names()):
            return f"no flag {name}"
    if head == "holmes":
        if len(words) > 1 and words[1] not in commands():
            return f"no command {words[1]}"
        missing = {word.partition("=")[0] for word in own if word.startswith("--")} - options(
            words[1]
        )
        return f"no option {missing}" if missing and theirs != words else ""
    if head == "make":
        targets = (ROOT / "Makefile").read_text()
        return "" if re.search(rf"^{words[1]}:", targets, re.MULTILINE) else f"no target {words[1]}"
    if head in ("python", "python3"):
        script = next((word for word in words[1:] if word.endswith(".py")), "")
        if script.startswith("benchmarks/"):
            text = "".join((ROOT / each).read_text() for each in (script, "benchmarks/harness.py"))
            return next(
                (f"{script} has no {name}" for name in flags if f'"{name}"' not in text), ""
            )
        return (
            "" if not script.startswith("examples/") or (ROOT / script).exists() else f"no {script}"
        )
    return "" if head in OTHERS else "not a command"


def unknown(text: str, kept: Sequence[str] = ()) -> list[str]:
    """Lines of a page that nothing here checks, or that fail."""
    found = []
    for lines in blocks(text):
        if lines[0].startswith(tuple(kept)):
            continue
        message = ""
        for line in lines:
            if line.startswith("holmes: ") or message and wrong(line):
                message = f"{message} {line}".strip()
                continue
            if fault := wrong(line):
                found.append(f"{fault}: {line}")
        if message and not said(message):
            found.append(f"no message of holmes: {message}")
    return found


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_made_or_checked(page):
    name = str(page.relative_to(ROOT))
    assert not unknown(page.read_text(), [begin for place, begin in KEPT if place == name])


def test_what_is_kept_is_there():
    for name, begin in KEPT:
        assert any(lines[0].startswith(begin) for lines in blocks((ROOT / name).read_text())), (
            name,
            begin,
        )


@pytest.mark.parametrize(
    "text",
    [
        "    holmes plna --cluster c.toml\n",
        "    holmes plan --clutser c.toml\n",
        "    make demos\n",
        "    step 3: loss 2.1\n",
        "    torchrun train.py --holmes-clutser c.toml\n",
        "    python benchmarks/stage_links.py --case x\n",
        "    holmes: the moon is in the way of node b1 and will be for long\n",
    ],
)
def test_a_new_block_that_nothing_checks_is_found(text):
    assert unknown(f"# A page\n\n{text}\nand more.\n")


def test_jobs_on_pages_have_printed_something():
    """Blocks of jobs on pages are not empty: docs/generate.py --lab PAGE has filled them in.

    integration_tests/commands/test_pages.py runs the jobs again.
    """
    for page in generate.pages():
        for found in generate._LAB.finditer(page.read_text()):
            assert found[3].strip(), f"{page}: {found[2]}"


def test_variables_on_pages_are_known():
    known = {*map(variable, names()), *variables(), "HOLMES"}
    for page in generate.pages():
        found = set(re.findall(r"\bHOLMES_[A-Z_]+\b", page.read_text()))
        tests = {"HOLMES_TEST_FULL", "HOLMES_TEST_CRDS", "HOLMES_TEST_CARRIER"}
        assert found <= known | tests | {"HOLMES_NAME"}, page
