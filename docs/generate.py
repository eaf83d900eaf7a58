"""Writes the generated blocks of README.md and docs/*.md.

There are three kinds:

    <!-- generated: NAME --> ... <!-- /generated -->    a table or text from the code or the
                                                        results; NAME is a function of BLOCKS
    <!-- run --> COMMAND ... <!-- /run -->              the output of a `holmes` command
    <!-- lab --> COMMAND ... <!-- /lab -->              the output of a job in the lab

    .venv/bin/python docs/generate.py            rewrites the blocks of README.md
                                                 and docs/, not those of the lab
    .venv/bin/python docs/generate.py docs/plan.md ...    rewrites the blocks of these pages only
    .venv/bin/python docs/generate.py --check    status 1, and the blocks that differ, when there are any
    .venv/bin/python docs/generate.py --lab docs/start.md ...    runs the lab's blocks of these
                                                                 pages, and rewrites them

tests/test_docs.py checks that the blocks are up to date, except those of the lab, whose times
differ each time. integration_tests/commands/test_pages.py runs these with HOLMES_TEST_FULL=1.
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

from holmes_lab.cli.lab_gpu import HUNG
from holmes_lab.process.job import TIMED_OUT
from packaging.version import Version

import holmes_ext
from holmes_ext.cli.main import Help, main, parser_of
from holmes_ext.cli.main import commands as all_commands
from holmes_ext.cluster import spec
from holmes_ext.cluster.keys import KEYS
from holmes_ext.join import EXTENSION as JOIN
from holmes_ext.options import default_of, flag, help_of, names, variable
from holmes_ext.options import variables as environment_variables
from holmes_ext.patches import all_patches
from holmes_ext.patches.megatron.command_line import flags as megatron_flags
from holmes_ext.patches.megatron.command_line.flags import MODEL_OF_FLAG, REASON_NOT_COUNTED
from holmes_ext.plan import plan
from holmes_ext.plan.cost.model import Model
from holmes_ext.planner.search import search
from holmes_ext.planner.show.search import INTERRUPTED_STATUS
from holmes_ext.runtime.measure import telemetry_file
from holmes_ext.runtime.watch.metrics import FAMILIES
from holmes_ext.weights.monitor import FAMILIES as WEIGHTS_FAMILIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))  # where this is loaded as a module
import benchmark_tables  # noqa: E402
import tables  # noqa: E402
from tables import table  # noqa: E402

#: File with the worst error of simulated steps, which holmes prints beside every optimality gap.
MODEL_ERROR = ROOT / "holmes_ext" / "planner" / "search" / "model_error.json"
_BLOCK = re.compile(
    r"(<!-- generated: (\w+)(?: ([^>]+?))? -->\n)(.*?)(<!-- /generated -->)", re.DOTALL
)
_RUN = re.compile(r"(<!-- run -->\n((?:    [^\n]*\n)+)\n)(.*?)(<!-- /run -->)", re.DOTALL)
_LAB = re.compile(r"(<!-- lab -->\n((?:    [^\n]*\n)+)\n)(.*?)(<!-- /lab -->)", re.DOTALL)
#: Lines of a job's output that a page leaves out: progress bars, and warnings of frameworks.
_NOISE = re.compile(
    r"%\||Warning: |\[WARNING\]|^\[transformers\]|^\s+warnings\.warn\(|site-packages/| Tip: |^-+$"
)
#: End of a line with the seconds of a search, which a page leaves out because they differ each
#: time.
_TOOK = re.compile(r"^(\d+ shapes?, .*), [\d.]+ s$")
#: Width of the terminal for a command, and the length at which its longer lines are cut with dots.
_COLUMNS, _CUT = 110, 150
#: Flag without "--holmes-" -> page that explains it.
PAGES = {
    "cluster": "clusters.md",
    "plan": "plan.md",
    "partition": "plan.md#layers-of-each-stage",
    "metrics": "step.md#metrics-for-prometheus",
    "preflight": "trouble.md#before-training-the-preflight",
    "watchdog": "trouble.md#it-hangs-the-watchdog",
    "telemetry": "step.md",
    "join": "joined.md",
    "outer": "joined_settings.md",
    "profile": "plan.md#from-the-job-itself-holmes-tune",
    "try_": "versions.md#use-a-newer-version",
}
#: Options that a first run may need, and those by which it is watched. The others of a single job tune it.
COMMON = (
    "cluster",
    "plan",
    "sizes",
    "check",
    "fsdp",
    "timeout",
    "require",
    "try_",
    "preflight",
    "fallback",
    "link_timeout",
    "watchdog",
    "telemetry",
    "metrics",
    "verbose",
)
#: Default in a help text: "(default 20)", "(default)", and the beginning of "(default 20; 0: no limit)".
_DEFAULT = re.compile(r" ?\(default:? [^;)]*\)| \(default\)")
_DEFAULT_BEFORE_MORE = re.compile(r"\(default:? [^;)]*; ")


def flags(group: str) -> str:
    """Return the Markdown table of the --holmes flags of a group, with their environment variables.

    Args:
        group: "common", "tuning" (what changes the speed of a job) or "joined" (of joined jobs).
    """
    rows = []
    if group == "common":
        rows = [("`--holmes`", "`HOLMES=1`", "", "switch it on; nothing is imported without it")]
    for name in names_of_group(group):
        text, value = help_of(name), default_of(name)
        page = f" ([more]({PAGES[name]}))" if name in PAGES else ""
        text = _without_default(text) if value else text
        default = f"`{value}`" if value else ""
        rows.append((f"`{flag(name)}`", f"`{variable(name)}`", default, text + page))
    return table(("flag", "variable", "default", "value and what it does"), rows)


def names_of_group(group: str) -> list[str]:
    """Return the names of the options in a group of flags(): common, tuning or joined."""
    joined = {option.name for option in JOIN.options}
    members = {"common": set(COMMON), "joined": joined, "tuning": set(names()) - {*COMMON, *joined}}
    return [name for name in names() if name in members[group]]


def _without_default(text: str) -> str:
    """Return a help text without its "(default 20)": the table has a column for defaults."""
    return _DEFAULT_BEFORE_MORE.sub("(", _DEFAULT.sub("", text))


def variables() -> str:
    """Return the Markdown table of the environment variables that have no flag."""
    return table(
        ("variable", "what it does"),
        ((f"`{name}`", text) for name, text in environment_variables().items()),
    )


def features() -> str:
    """Return the Markdown table of holmes's features, for the pages in docs/.

    A feature is a group of patches of a framework's functions that are applied together. The names
    in the first column are the values of HOLMES_DISABLE, --holmes-require and --holmes-try.
    """
    feature_of_name = {patch.feature.name: patch.feature for patch in all_patches()}
    rows = (
        (
            f"`{name}`",
            feature.what,
            f"`{feature.versions}`",
            f"`{feature.switch}`" if feature.switch else "every job",
        )
        for name, feature in feature_of_name.items()
    )
    return table(("feature", "what it does", "versions", "asked for by"), rows)


def command_lines() -> str:
    """Return three Markdown tables of Megatron's flags and DeepSpeed's configuration keys.

    `holmes plan -- COMMAND` reads the flags and keys of the first table. It does not use those of
    the second table ("named"), but names them to the user with a reason. A row of the second table
    has a reason, and all flags and keys with this reason. With a flag of the third table, the model
    is refused.
    """
    read = {
        "sizes": megatron_flags.SIZES,
        "the model": megatron_flags.MODEL,
        "training": megatron_flags.TRAINING,
        "ds_config": megatron_flags.SETTING_OF_KEY,
    }
    # Reason why a flag or key does not count -> all names with this reason.
    named = {
        why: [name for name, other in REASON_NOT_COUNTED.items() if other == why]
        for why in REASON_NOT_COUNTED.values()
    }
    # Model that is no stack of equal transformer blocks -> flags that show it.
    refused = {
        model: [name for name, other in MODEL_OF_FLAG.items() if other == model]
        for model in MODEL_OF_FLAG.values()
    }
    return "\n".join(
        table(
            head,
            ((what, ", ".join(f"`{name}`" for name in names)) for what, names in found.items()),
        )
        for head, found in (
            (("read", "flags and keys"), read),
            (("named", "flags and keys"), named),
            (("refused: a model with", "flags"), refused),
        )
    )


def cluster_keys() -> str:
    """Return the Markdown table of the keys of cluster.toml, for the pages in docs/.

    A row has the table of the TOML file, the key, its type, its default and its meaning.
    """
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
    """Return the Markdown table of the keys of a model file, for the pages in docs/.

    A model file describes a transformer (layers, hidden size, ...) and its batch sizes for
    `holmes plan --model`.
    """
    type_names = {"int": "a number", "float": "a number", "str": "a text", "bool": "true, false"}
    rows = []
    for field in dataclasses.fields(Model):
        if not field.metadata:  # not a key of the file
            continue
        table_name = "[training] " if field.metadata["training"] else ""
        rows.append(
            (
                f"`{table_name}{field.name}`",
                type_names[field.type],
                _default(field),
                field.metadata["text"],
            )
        )
    return table(("key", "value", "left out", "what it says"), rows)


def _default(field: dataclasses.Field) -> str:
    return "**needed**" if field.default is dataclasses.MISSING else str(field.default).lower()


def metrics() -> str:
    """Return the Markdown table of the metrics that --holmes-metrics exports to Prometheus.

    It is shown on a page in docs/.
    """
    return table(
        ("metric", "kind", "labels", "what it is"),
        (
            (
                f"`{name}`",
                "counter" if name.endswith("_total") else "gauge",
                ", ".join(f"`{label}`" for label in family.labels),
                family.help,
            )
            for name, family in FAMILIES.items()
        ),
    )


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of a command that take arguments: its own, or those of its subcommands."""
    subcommands = next(
        (
            action.choices
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
        ),
        {},
    )
    if not subcommands:
        yield parser
    for subparser in subcommands.values():
        yield from _parsers(subparser)


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage of a command, wrapped at 100 characters on every terminal."""
    parser.formatter_class = lambda prog: Help(prog, width=100)
    return parser.format_usage().removeprefix("usage: ")


def _arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a command with their help texts, as cells of a table."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if "--help" in action.option_strings or action.help == argparse.SUPPRESS:
            continue
        shown = str(action.metavar or action.dest.upper())
        if action.option_strings:
            # "--include P [P ...]", as in the usage; a flag has no value.
            value = formatter._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
            shown = f"{', '.join(action.option_strings)} {value}".strip()
        text = (action.help or "").replace("%%", "%") % {"default": action.default}
        yield f"`{shown}`", _with_default_as_code(text)


def _with_default_as_code(text: str) -> str:
    """Return a help text with its default in backquotes; a default of several words stays as it is."""
    return re.sub(r'default: "?([^\s;,")]+(?:,[^\s;,")]+)*)"?(?=[;,)])', r"default: `\1`", text)


def commands() -> str:
    """Return a section for each command: what its --help says, to the last line."""
    sections = []
    for name in all_commands():
        top = parser_of(name)
        parsers = list(_parsers(top))
        if top not in parsers and top.epilog:  # of all subcommands together
            sections.append(f"## {top.prog}\n\n{top.description}\n\n{_epilog(top)}")
        for parser in parsers:
            about = (parser.description or top.description or "").replace("%%", "%")
            parts = [
                f"## {parser.prog}\n\n{' '.join(about.split())}\n",
                f"```text\n{_usage(parser)}```\n",
                table(("argument", "what it does"), _arguments(parser)),
            ]
            if parser.epilog:
                parts.append(_epilog(parser))
            sections.append("\n".join(parts))
    return "\n" + "\n".join(sections) + "\n"


def _epilog(parser: argparse.ArgumentParser) -> str:
    """Return what stands below the options in a command's --help: examples, and the exit status."""
    text = (parser.epilog or "").replace("%%", "%").strip("\n")
    return f"```text\n{text}\n```\n"


def statuses() -> str:
    """Return the Markdown table of the exit statuses of all commands."""
    return table(
        ("status", "meaning"),
        (
            ("0", "success; notes do not count"),
            ("1", "the command found a problem: `holmes COMMAND --help` says which"),
            ("2", "bad usage or bad input, or the disk is full: one line on stderr"),
            (f"{TIMED_OUT}", "`holmes lab run --timeout`: the time is over"),
            (f"{HUNG}", "`holmes lab run --gpu`: no rank progressed any more"),
            (
                f"{INTERRUPTED_STATUS}",
                "Ctrl-C; `holmes plan` prints the best plan found until then",
            ),
            (
                "any other",
                "`holmes lab run`: that of the first rank that failed, 128 + n after signal n",
            ),
        ),
    )


def newer_version() -> str:
    """Return the start line's warning for a torch that is newer than all that were tried."""
    torch = next(patch.feature for patch in all_patches() if patch.feature.name == "ddp")
    newest = max(map(Version, torch.tried))
    warning = torch.warning_if_newer_than_tried(f"{newest.major}.{newest.minor + 1}.0")
    return f"\n    {warning}\n\n"


#: Framework, as pages call it -> a feature whose releases are those that trained.
TRAINED = {
    "torch": "ddp",
    "DeepSpeed": "overlap",
    "megatron-core": "megatron-layers",
    "transformers": "joined-transformers",
    "Lightning": "lightning-ranks",
}
#: Release of a framework that is none on PyPI -> its description.
UNRELEASED = {("megatron-core", "0.20.0"): "unreleased d98e8a64 (calls itself 0.20.0)"}


def trained() -> str:
    """Return the Markdown table of the releases that trained, and of those whose source was compared.

    Both are those that the features of holmes declare (Feature.tried and Feature.read).
    """
    features = {patch.feature.name: patch.feature for patch in all_patches()}
    lines = []
    for framework, name in TRAINED.items():
        feature = features[name]
        releases = [UNRELEASED.get((framework, each), each) for each in feature.tried]
        lines.append((framework, ", ".join(releases), ", ".join(feature.read)))
    return table(("framework", "used for training", "source compared"), lines)


def pythons() -> list[str]:
    """Return the supported versions of Python, as pyproject.toml lists them: "3.10", ..."""
    return re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())


def _signature(name: str, value: Any) -> str:
    return name + (str(inspect.signature(value)).replace("'", "") if callable(value) else "")


#: Description of holmes_ext.initialize_model_parallel. Its docstring cannot be read here, because
#: the name can only be loaded where megatron-core is installed.
_INITIALIZE_MODEL_PARALLEL = (
    "megatron.core.parallel_state's function, which also switches holmes on where it is off "
    "(import it above init_process_group)"
)


def _public_names() -> Iterator[tuple[str, Any]]:
    """Yield each public name of holmes_ext with its object; None for the function of megatron-core.

    That function can only be loaded where megatron-core is installed.
    """
    for name in sorted(holmes_ext.__all__):
        yield name, None if name == "initialize_model_parallel" else getattr(holmes_ext, name)


def api() -> str:
    """Return a table of the public names, and a line "::: MODULE.NAME" for each.

    mkdocstrings replaces such a line by the signature and the docstring.
    """
    full_names = [
        f"{holmes_ext._MODULE_OF[name]}.{name}"
        for name, value in _public_names()
        if value is not None
    ]
    rows = ((f"`{name}`", _first_sentence(value)) for name, value in _public_names())
    return table(("name", "what it is"), rows) + "".join(f"\n::: {name}\n" for name in full_names)


def _first_sentence(value: Any) -> str:
    """Return the first sentence of an object's docstring, without the full stop."""
    if value:
        text = " ".join((inspect.getdoc(value) or "").split())
    else:
        text = _INITIALIZE_MODEL_PARALLEL
    return re.split(r"(?<=[.;]) ", text)[0].rstrip(".;")


def public() -> str:
    """Return the list of everything that users and scripts may rely on, and that must not change.

    It has public names, flags, variables, commands with their options, and versions of files.
    """
    lines = ["\n## Names of the package `holmes_ext`\n"]
    for name, value in _public_names():
        if inspect.isclass(value):
            members = [member for member in vars(value) if not member.startswith("_")]
            lines.append(f"- `{name}`" + (f": `{', '.join(sorted(members))}`" if members else ""))
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
                for action in parser._actions
                for word in action.option_strings
                if word.startswith("--") and action.help != argparse.SUPPRESS
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
    metric_names = [*FAMILIES, *WEIGHTS_FAMILIES]
    lines += [f"- metrics: {', '.join(f'`{name}`' for name in metric_names)}"]
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
    """Return a whole file of this repository as a block of code.

    Args:
        path: Path from the root of the repository.
    """
    return f"```{LANGUAGES[Path(path).suffix]}\n{(ROOT / path).read_text().rstrip()}\n```\n"


#: Name in <!-- generated: NAME ARGUMENTS --> -> function that returns the text of the block.
BLOCKS = {
    function.__name__: function
    for function in (
        flags,
        variables,
        features,
        command_lines,
        cluster_keys,
        model_keys,
        metrics,
        commands,
        statuses,
        newer_version,
        trained,
        api,
        public,
        source,
        tables.measured,
        tables.placed,
        tables.rows,
        tables.cells,
        benchmark_tables.speed,
        benchmark_tables.variants,
        benchmark_tables.ranges,
        benchmark_tables.errors,
        benchmark_tables.sources,
        benchmark_tables.programs,
    )
}


def pages() -> list[Path]:
    """Return all pages that may have generated blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def printed(command: str) -> str:
    """Run a `holmes` command in this process, in the folder of README.md, and return its output.

    Raises:
        AssertionError: The command fails.
    """
    words, out = shlex.split(command.replace("\\\n", " ")), io.StringIO()
    # A search for a plan starts a second process after ALONE_S seconds. It must not do so here:
    # with two processes, chance decides which plans are tried in the time, and so the output.
    alone_s, search.ALONE_S = search.ALONE_S, float("inf")
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), str(_COLUMNS)
    folder = os.getcwd()
    try:
        os.chdir(ROOT)
        with contextlib.redirect_stdout(out):
            status = main(words[1:])
    finally:
        os.chdir(folder)
        if columns is None:
            os.environ.pop("COLUMNS")
        else:
            os.environ["COLUMNS"] = columns
        search.ALONE_S = alone_s
    assert words[0] == "holmes" and status == 0, f"{command}: status {status}"
    # Without the seconds that a search took, and with long lines cut.
    return _cut(out.getvalue())


def _cut(output: str) -> str:
    """Return a command's output without the seconds of a search, and with its long lines cut."""
    lines = []
    for line in output.splitlines():
        line = _TOOK.sub(r"\1", line.rstrip())
        is_flags = line.startswith("  --")  # which readers copy, so they are not cut
        lines.append(line if len(line) <= _CUT or is_flags else f"{line[:_CUT]} ...")
    return "\n".join(lines) + "\n"


def renewed(text: str) -> str:
    """Return a Markdown page with the content of its generated blocks made anew.

    `<!-- generated: NAME -->` gets the text that the function BLOCKS[NAME] returns.
    `<!-- run -->` gets the output of the `holmes` command in it, which is run in this process.
    Blocks `<!-- lab -->` stay as they are.

    Args:
        text: The page in Markdown.
    """

    def run_command(match: re.Match[str]) -> str:
        """Return a block <!-- run --> with the command's output of now."""
        begin, command, _old_output, end = match.groups()
        return begin + textwrap.indent(printed(textwrap.dedent(command)), "    ") + end

    def make_block(match: re.Match[str]) -> str:
        """Return a block <!-- generated --> with the text that its function returns."""
        begin, name, arguments, _old_text, end = match.groups()
        make = BLOCKS[name]
        return begin + (make(arguments) if arguments else make()) + end

    return _RUN.sub(run_command, _BLOCK.sub(make_block, text))


def in_lab(text: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Run all commands of a page that start jobs in an emulated cluster, and yield their outputs.

    Such a command and its output stand in a block "<!-- lab --> ... <!-- /lab -->" of the page. The
    commands run one after another, in the same folder.

    Args:
        text: The page in Markdown.
        folder: Empty folder in which the commands run. It gets links to the examples, because the
            commands name scripts by their paths in the repository.

    Yields:
        The command, its output in the page, and its output now: without progress bars and warnings
        of frameworks, and with long lines cut.

    Raises:
        AssertionError: A command fails.
    """
    for name in ("examples", "integration_tests"):
        (folder / name).symlink_to(ROOT / name)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "PATH": path, "COLUMNS": "130", "OMP_NUM_THREADS": "1"}
    for match in _LAB.finditer(text):
        _begin, indented_command, old_output, _end = match.groups()
        command = textwrap.dedent(indented_command)
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
        # The path of the temporary folder differs each time, so it is removed.
        lines = [
            line
            for line in done.stdout.replace(f"{folder}/", "").splitlines()
            if not _NOISE.search(line)
        ]
        yield command, textwrap.dedent(old_output), _cut(re.sub(r"\n\n+", "\n\n", "\n".join(lines)))


def write_lab(pages: list[str]) -> None:
    """Run the commands in the blocks "<!-- lab -->" of pages, and replace the outputs there.

    Args:
        pages: Paths of Markdown files.
    """
    for page in map(Path, pages):
        text = page.read_text()
        with tempfile.TemporaryDirectory() as folder:
            outputs = [
                textwrap.indent(printed, "    ") for _, _, printed in in_lab(text, Path(folder))
            ]
        # Groups of _LAB: 1 is the begin of the block with its command, 3 the old output, 4 the end
        # of the block. Each match takes the next of the new outputs.
        page.write_text(
            _LAB.sub(lambda found, left=iter(outputs): found[1] + next(left) + found[4], text)
        )


def write(argv: list[str]) -> int:
    """Rewrite the generated parts of README.md and docs/*.md.

    The parts are the blocks `<!-- generated -->` (tables made from code and benchmark results) and
    `<!-- run -->` (commands with their outputs).

    Args:
        argv: Command line. [] rewrites the blocks, and also writes the file model_error.json, which
            is computed from the benchmark results. ["--check"] changes nothing, and prints the
            pages that are out of date. [PAGE, ...] rewrites the blocks of these Markdown files only.
            ["--lab", PAGE, ...] rewrites other blocks, those of the
            kind `<!-- lab -->` in these pages: it runs their jobs again in emulated clusters.

    Returns:
        The exit status: 1 if --check finds a page that is out of date, otherwise 0.
    """
    if not argv:
        MODEL_ERROR.write_text(tables.model_error_file())
    if argv[:1] == ["--lab"]:
        write_lab(argv[1:])
        return 0
    only_checks = argv == ["--check"]
    chosen_pages = pages() if only_checks or not argv else [Path(name).resolve() for name in argv]
    old = {page: page.read_text() for page in chosen_pages}
    changed = {page: text for page, before in old.items() if (text := renewed(before)) != before}
    for page, text in changed.items():
        print(f"{page.relative_to(ROOT)}: {'differs from the code' if only_checks else 'written'}")
        if not only_checks:
            page.write_text(text)
    return 1 if only_checks and changed else 0


if __name__ == "__main__":
    sys.exit(write(sys.argv[1:]))
