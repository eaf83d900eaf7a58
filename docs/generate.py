"""Writes what the pages take from the code and from benchmarks/results, between <!-- generated: NAME --> and
<!-- /generated -->; and what a `holmes` command prints, below the command between <!-- run --> and <!-- /run
-->; and what a job prints in the lab, between <!-- lab --> and <!-- /lab -->.

    .venv/bin/python docs/generate.py            rewrites the blocks of README.md
                                                 and docs/, not those of the lab
    .venv/bin/python docs/generate.py --check    status 1, and the blocks that differ, when there are any
    .venv/bin/python docs/generate.py --lab docs/start.md ...    runs the lab's blocks of these
                                                                 pages, and rewrites them

tests/test_docs.py checks the same; integration_tests/commands/test_pages.py runs the lab's with
HOLMES_TEST_FULL=1, whose times differ each time. Blocks are the functions of BLOCKS; those of results take
arguments (tables.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import holmes_ext
from holmes_ext.cli.main import Help, main, parser_of
from holmes_ext.cli.main import commands as all_commands
from holmes_ext.cluster import spec
from holmes_ext.cluster.keys import KEYS
from holmes_ext.options import default_of, flag, help_of, names, variable
from holmes_ext.options import variables as environment_variables
from holmes_ext.patches import all_patches
from holmes_ext.patches.megatron.command_line import flags as megatron_flags
from holmes_ext.patches.megatron.command_line.flags import REASON_NOT_COUNTED
from holmes_ext.plan import plan
from holmes_ext.plan.cost.model import Model
from holmes_ext.planner.search import search
from holmes_ext.runtime.measure import telemetry_file
from holmes_ext.runtime.watch.metrics import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))  # where this is loaded as a module
import tables  # noqa: E402
from tables import table  # noqa: E402

#: Error of the model, which every optimality gap names.
MODEL_ERROR = ROOT / "holmes_ext" / "planner" / "search" / "model_error.json"
_BLOCK = re.compile(
    r"(<!-- generated: (\w+)(?: ([^>]+?))? -->\n)(.*?)(<!-- /generated -->)", re.DOTALL
)
_RUN = re.compile(r"(<!-- run -->\n((?:    [^\n]*\n)+)\n)(.*?)(<!-- /run -->)", re.DOTALL)
_LAB = re.compile(r"(<!-- lab -->\n((?:    [^\n]*\n)+)\n)(.*?)(<!-- /lab -->)", re.DOTALL)
#: Progress bars, and warnings of frameworks.
_NOISE = re.compile(
    r"%\||Warning: |\[WARNING\]|^\[transformers\]|^\s+warnings\.warn\(|site-packages/| Tip: |^-+$"
)
#: How long a search took here, which no page says.
_TOOK = re.compile(r"^(\d+ shapes, .*), [\d.]+ s$")
#: Characters of a line of a command's output; a longer one is cut, and ends in dots.
_COLUMNS, _CUT = 110, 150
#: Where a flag has a page of its own.
PAGES = {
    "cluster": "clusters.md",
    "plan": "plan.md",
    "partition": "plan.md#layers-of-each-stage",
    "metrics": "metrics.md",
    "preflight": "trouble.md#before-training-the-preflight",
    "watchdog": "trouble.md#it-hangs-the-watchdog",
    "telemetry": "step.md",
    "join": "joined.md",
    "outer": "joined.md#how-they-update-each-other",
    "profile": "plan.md#from-the-job-itself-holmes-tune",
    "try_": "versions.md#a-version-that-is-newer",
}


def flags() -> str:
    """Every --holmes flag with its twin."""
    rows = [("`--holmes`", "`HOLMES=1`", "", "switch it on; nothing is imported without it")]
    for name in names():
        text, value = help_of(name), default_of(name)
        page = f" ([more]({PAGES[name]}))" if name in PAGES else ""
        text = re.sub(r" ?\(default:? [^)]*\)| \(default\)", "", text) if value else text
        default = f"`{value}`" if value else ""
        rows.append((f"`{flag(name)}`", f"`{variable(name)}`", default, text + page))
    return table(("flag", "variable", "default", "value and what it does"), rows)


def variables() -> str:
    """Variables that are no twins of flags."""
    return table(
        ("variable", "what it does"),
        ((f"`{name}`", text) for name, text in environment_variables().items()),
    )


def features() -> str:
    """What HOLMES_DISABLE, --holmes-require and --holmes-try take."""
    found = {patch.feature.name: patch.feature for patch in all_patches()}
    rows = (
        (
            f"`{name}`",
            one.what,
            f"`{one.versions}`",
            f"`{one.switch}`" if one.switch else "every job",
        )
        for name, one in found.items()
    )
    return table(("feature", "what it does", "versions", "asked for by"), rows)


def command_lines() -> str:
    """What `holmes plan -- COMMAND` reads of Megatron's flags and of ds_config, and what it names as not
    counted."""
    read = {
        "sizes": megatron_flags.SIZES,
        "the model": megatron_flags.MODEL,
        "training": megatron_flags.TRAINING,
        "ds_config": megatron_flags.SETTING_OF_KEY,
    }
    named = {
        why: [name for name, other in REASON_NOT_COUNTED.items() if other == why]
        for why in REASON_NOT_COUNTED.values()
    }
    return "\n".join(
        table(
            head,
            ((what, ", ".join(f"`{name}`" for name in names)) for what, names in found.items()),
        )
        for head, found in (
            (("read", "flags and keys"), read),
            (("named", "flags and keys"), named),
        )
    )


def cluster_keys() -> str:
    """The keys of cluster.toml."""
    rows = (
        (
            f"`{key.table}`" if key.table else "top",
            f"`{key.name}`",
            key.value_type,
            key.default or "**needed**",
            key.meaning,
        )
        for key in KEYS
    )
    return table(("table", "key", "value", "left out", "what it says"), rows)


def model_keys() -> str:
    """The keys of a model file."""
    kinds = {"int": "a number", "float": "a number", "str": "a text", "bool": "true, false"}
    rows = (
        (
            f"`{'[training] ' * own.metadata['training']}{own.name}`",
            kinds[own.type],
            _default(own),
            own.metadata["text"],
        )
        for own in dataclasses.fields(Model)
        if own.metadata
    )
    return table(("key", "value", "left out", "what it says"), rows)


def _default(field: dataclasses.Field) -> str:
    return "**needed**" if field.default is dataclasses.MISSING else str(field.default).lower()


def metrics() -> str:
    """What --holmes-metrics tells."""
    return table(
        ("metric", "kind", "labels", "what it is"),
        (
            (
                f"`{name}`",
                "counter" if name.endswith("_total") else "gauge",
                ", ".join(f"`{label}`" for label in one.labels),
                one.help,
            )
            for name, one in FAMILIES.items()
        ),
    )


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of a command that take arguments: itself, or its actions'."""
    below = next(
        (one.choices for one in parser._actions if isinstance(one, argparse._SubParsersAction)), {}
    )
    if not below:
        yield parser
    for each in below.values():
        yield from _parsers(each)


def _usage(parser: argparse.ArgumentParser) -> str:
    """On lines of 100 characters, whatever the terminal."""
    parser.formatter_class = lambda prog: Help(prog, width=100)
    return parser.format_usage().removeprefix("usage: ")


def _arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if "--help" in action.option_strings:
            continue
        value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else value
        names = ", ".join(action.option_strings) or str(value)
        shown = f"{names} {choices}" if action.option_strings and action.nargs != 0 else names
        yield f"`{shown}`", (action.help or "").replace("%%", "%") % {"default": action.default}


def commands() -> str:
    """Every command with its options, as its --help has them."""
    parts = []
    for name in all_commands():
        top = parser_of(name)
        for parser in _parsers(top):
            title = parser.prog.removeprefix("holmes ")
            about = (parser.description or top.description or "").replace("%%", "%")
            parts.append(
                f"## holmes {title}\n\n{' '.join(about.split())}\n\n```text\n{_usage(parser)}```\n\n"
                + table(("argument", "what it does"), _arguments(parser))
            )
    return "\n" + "\n".join(parts) + "\n"


def _signature(name: str, value: Any) -> str:
    return name + (str(inspect.signature(value)).replace("'", "") if callable(value) else "")


#: Of holmes_ext.initialize_model_parallel, which only a program on megatron-core can load.
_MEGATRONS = (
    "megatron.core.parallel_state's function, which also switches holmes on where it is off "
    "(import it above init_process_group)"
)


def _public_names() -> Iterator[tuple[str, Any]]:
    """(name, what it is); None for megatron.core's function, which only a job needs to load."""
    for name in sorted(holmes_ext.__all__):
        yield name, None if name == "initialize_model_parallel" else getattr(holmes_ext, name)


def api() -> str:
    """The public names as mkdocstrings takes them, which reads signatures and docstrings in the source."""
    homes = [
        f"{holmes_ext._MODULE_OF[name]}.{name}"
        for name, value in _public_names()
        if value is not None
    ]
    rows = ((f"`{name}`", _first(value)) for name, value in _public_names())
    return table(("name", "what it is"), rows) + "".join(f"\n::: {home}\n" for home in homes)


def _first(value: Any) -> str:
    """Sentence of its docstring."""
    said = " ".join((inspect.getdoc(value) or "").split()) if value else _MEGATRONS
    return re.split(r"(?<=[.;]) ", said)[0].rstrip(".;")


def public() -> str:
    """What users, tests and scripts may rely on: a change of this list is a change of the contract."""
    lines = ["\n## Names of the package `holmes_ext`\n"]
    for name, value in _public_names():
        if inspect.isclass(value):
            own = [one for one in vars(value) if not one.startswith("_")]
            lines.append(f"- `{name}`" + (f": `{', '.join(sorted(own))}`" if own else ""))
        else:
            lines.append(f"- `{_signature(name, value)}`")
    lines += [
        "\n## Flags and variables\n",
        f"`--holmes`, {', '.join(f'`{flag(name)}`' for name in names())};",
        f"{', '.join(f'`{variable(name)}`' for name in names())}, "
        f"{', '.join(f'`{name}`' for name in environment_variables())}",
    ]
    lines += ["\n## Commands and their options\n"]
    for name in all_commands():
        for parser in _parsers(parser_of(name)):
            words = sorted(
                word
                for one in parser._actions
                for word in one.option_strings
                if word.startswith("--")
            )
            lines.append(
                f"- `{parser.prog}`: {', '.join(f'`{word}`' for word in words if word != '--help')}"
            )
    versions = {"plan.json": plan.VERSION, "telemetry's rank*.jsonl": telemetry_file.VERSION}
    lines += [
        "\n## Files, and the versions that are read\n",
        f"- cluster.toml: {spec.VERSION}; its keys:"
        f" {', '.join(f'`{key.table}{key.name}`' for key in KEYS)}",
    ]
    lines += [f"- {name}: {value}" for name, value in versions.items()]
    lines += [f"- metrics: {', '.join(f'`{name}`' for name in FAMILIES)}"]
    return "\n".join(lines) + "\n\n"


#: Ending of a file -> what a page calls its language.
LANGUAGES = {
    ".py": "python",
    ".toml": "toml",
    ".sbatch": "bash",
    ".sh": "bash",
    ".yaml": "yaml",
    "": "dockerfile",
}


def source(path: str) -> str:
    """A file of this repository, whole."""
    return f"```{LANGUAGES[Path(path).suffix]}\n{(ROOT / path).read_text().rstrip()}\n```\n"


BLOCKS = {
    one.__name__: one
    for one in (
        flags,
        variables,
        features,
        command_lines,
        cluster_keys,
        model_keys,
        metrics,
        commands,
        api,
        public,
        source,
        tables.measured,
        tables.placed,
        tables.rows,
        tables.cells,
        tables.about,
    )
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def printed(command: str) -> str:
    """What a `holmes` command line prints, run here in the folder of README.md. A search has one process: how
    many plans two of them look at is a matter of luck."""
    words, out = shlex.split(command.replace("\\\n", " ")), io.StringIO()
    alone, search.ALONE_S = search.ALONE_S, float("inf")
    before, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), str(_COLUMNS)
    folder = os.getcwd()
    try:
        os.chdir(ROOT)
        with contextlib.redirect_stdout(out):
            status = main(words[1:])
    finally:
        os.chdir(folder)
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
        search.ALONE_S = alone
    assert words[0] == "holmes" and status == 0, f"{command}: status {status}"
    return _cut(out.getvalue())


def _cut(printed: str) -> str:
    lines = [_TOOK.sub(r"\1", line.rstrip()) for line in printed.splitlines()]
    whole = [
        len(line) <= _CUT or line.startswith("  --") for line in lines
    ]  # flags are there to be copied
    return (
        "\n".join(line if fits else f"{line[:_CUT]} ..." for line, fits in zip(lines, whole)) + "\n"
    )


def renewed(text: str) -> str:
    """A page with its blocks as they should be."""

    def run(found: re.Match[str]) -> str:
        return found[1] + textwrap.indent(printed(textwrap.dedent(found[2])), "    ") + found[4]

    def made(found: re.Match[str]) -> str:
        return (
            found[1] + (BLOCKS[found[2]](found[3]) if found[3] else BLOCKS[found[2]]()) + found[5]
        )

    return _RUN.sub(run, _BLOCK.sub(made, text))


def in_lab(text: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """(command, what the page says that it prints, what it prints) of a page's blocks, run in turn in a
    folder that has the examples; without progress bars. AssertionError where one fails."""
    for name in ("examples", "integration_tests"):
        (folder / name).symlink_to(ROOT / name)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "PATH": path, "COLUMNS": "130", "OMP_NUM_THREADS": "1"}
    for found in _LAB.finditer(text):
        command = textwrap.dedent(found[2])
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"],
            cwd=folder,
            env=env,
            text=True,
            timeout=300,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, f"{command}{done.stdout}"
        lines = [
            line
            for line in done.stdout.replace(f"{folder}/", "").splitlines()
            if not _NOISE.search(line)
        ]
        yield command, textwrap.dedent(found[3]), _cut(re.sub(r"\n\n+", "\n\n", "\n".join(lines)))


def write_lab(pages: list[str]) -> None:
    for page in map(Path, pages):
        text = page.read_text()
        with tempfile.TemporaryDirectory() as folder:
            outputs = [
                textwrap.indent(printed, "    ") for _, _, printed in in_lab(text, Path(folder))
            ]
        page.write_text(
            _LAB.sub(lambda found, left=iter(outputs): found[1] + next(left) + found[4], text)
        )


def write(argv: list[str]) -> int:
    if not argv:
        MODEL_ERROR.write_text(tables.model_error_file())
    if argv[:1] == ["--lab"]:
        write_lab(argv[1:])
        return 0
    old = {page: page.read_text() for page in pages()}
    changed = {page: text for page, before in old.items() if (text := renewed(before)) != before}
    for page, text in changed.items():
        print(f"{page.relative_to(ROOT)}: {'differs from the code' if argv else 'written'}")
        if not argv:
            page.write_text(text)
    return 1 if argv and changed else 0


if __name__ == "__main__":
    sys.exit(write(sys.argv[1:]))
