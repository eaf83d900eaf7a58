"""What is wrong with a training command: script, flags, sizes against the clusters, ds_config."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.doctor.frameworks import check_megatron_deepspeed, check_script
from holmes_ext.errors import HolmesError
from holmes_ext.options import PREFIX, Options, meant, parse_flags
from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.megatron.command_line.describe import describe, sizes_from_arguments
from holmes_ext.patches.megatron.command_line.refusals import refusals
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.plan import Plan, check_plan, load_plan
from holmes_ext.plan.shape import shape_of
from holmes_ext.plan.sizes import parse_sizes


@dataclass(frozen=True)
class Command:
    """launcher: words before the script; script: "" where a module is started; arguments: the script's."""

    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]


def split_command(words: Sequence[str]) -> Command:
    """The training script is the first word that ends in .py, else the module after the last -m."""
    for number, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return Command(tuple(words[:number]), word, tuple(words[number + 1 :]))
    if "-m" in words:
        number = len(words) - list(words)[::-1].index("-m") + 1
        return Command(tuple(words[:number]), "", tuple(words[number:]))
    raise HolmesError(
        f"holmes doctor -- {' '.join(words)[:80]}: no training script (FILE.py, or -m MODULE) "
        "in the command; give the whole command"
    )


def check_command(
    words: Sequence[str], spec: SiteSpec | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Of a command line; `spec`: of --cluster, else the command's own --holmes-cluster counts."""
    command = split_command(words)
    if command.launcher and not shutil.which(command.launcher[0]):
        yield problem(
            command.launcher[0],
            "there is no such program",
            "the command cannot start",
            "install it, or give its path",
        )
    if command.script and not Path(command.script).is_file():
        yield problem(
            command.script,
            "there is no such file",
            "the command cannot start",
            f"give the script's path from here ({os.getcwd()})",
        )
    elif command.script:
        yield from check_script(Path(command.script))
        yield from check_megatron_deepspeed(Path(command.script).resolve().parent)
    about = "the command's flags"
    try:
        options, rest = parse_flags(list(command.arguments), environ)
        flagged = any(word == PREFIX or word.startswith(f"{PREFIX}-") for word in command.arguments)
        wrapped = "holmes_ext" in command.launcher
        if not (flagged or wrapped or environ.get("HOLMES", "") not in ("", "0")):
            yield problem(
                "the command",
                f"{PREFIX} is not among the script's arguments and HOLMES is not set",
                "holmes does nothing in this job",
                f"add {PREFIX} after the script's name",
            )
        about = "--holmes-cluster"
        spec = spec or (load_spec(options.cluster) if options.cluster else None)
        about = "the command"
        yield from _check_plan(command, options, rest, spec)
    except HolmesError as error:
        yield problem(
            about, str(error), "the job ends at start-up with this line", "fix it as the line says"
        )


def _check_plan(
    command: Command, options: Options, rest: list[str], spec: SiteSpec | None
) -> Iterator[Finding]:
    sizes = (
        parse_sizes(options.sizes, "--holmes-sizes")
        if options.sizes
        else sizes_from_arguments(rest)
    )
    config = ds_config.from_arguments(rest)
    if config is not None and not config.digest:
        yield problem(
            config.path,
            "cannot be read as JSON",
            "DeepSpeed ends with an error",
            "give --deepspeed_config an existing JSON file",
        )
    if spec is None:
        yield note(
            "clusters",
            "no cluster.toml is known, so sizes are not checked against the clusters",
            "holmes works the clusters out at start-up",
            "give --cluster FILE",
        )
        return
    site = site_from_spec(spec)
    plan = check_plan(load_plan(options.plan), site) if options.plan else build_plan(site, sizes)
    yield from _check_layout(rest, plan, bool(options.plan) or options.partition != "uniform")
    if config is not None and config.digest:
        for line in ds_config.check(config, plan, options.overlap):
            yield note(config.path, line, "the setting does nothing", "remove it")
    for spanning in plan.spanning:
        yield note(
            f"{spanning.kind} groups",
            f"{spanning.groups} of them span clusters and go over {spanning.fabric}",
            "their traffic is as slow as that network",
            "look at `holmes plan` for sizes under which none does",
        )
    yield from _check_launcher(command, site)


def _check_layout(rest: list[str], plan: Plan, partitioned: bool) -> Iterator[Finding]:
    """Whether what the flags name divides under the plan's sizes; and misspelt flags of holmes."""
    said = describe(rest)
    for word in said.unknown:
        if near := meant(word):
            yield problem(word, f"did you mean {near}?", "holmes does not read it", "write it so")
    if said.model is not None and plan.sizes is not None:
        for line in refusals(said, plan.sizes, plan.world_size, partitioned):
            yield problem(
                "the command",
                line,
                "the framework ends with an error",
                "change it as the line says",
            )
        try:
            shape_of(said.model, plan.sizes, said.zero, said.virtual)
        except HolmesError as error:
            yield problem(
                "the command",
                str(error),
                "the framework ends with an error",
                "change it as the line says",
            )


def _check_launcher(command: Command, site: Site) -> Iterator[Finding]:
    """Number of nodes and of processes for each that the launcher's own options name."""
    options = {}
    for word, following in zip(command.launcher, [*command.launcher[1:], ""]):
        name, equals, value = word.partition("=")
        options[name.replace("_", "-")] = value if equals else following
    nodes = options.get("--nnodes", "")
    if nodes.isdecimal() and int(nodes) != len(site.nodes):
        yield problem(
            "--nnodes",
            f"is {nodes}, but the clusters have {len(site.nodes)} nodes",
            "the job waits for ranks that never come, or ends at start-up",
            "start it on all nodes of cluster.toml, or take nodes out of the file",
        )
    named = (options.get(name, "") for name in ("--nproc-per-node", "--num-gpus"))
    processes = next((value for value in named if value.isdecimal()), "")
    wrong = [node for node in site.nodes if processes and node.processes != int(processes)]
    if wrong:
        yield problem(
            "--nproc-per-node",
            f"is {processes}, but node {wrong[0].name} has {wrong[0].processes} processes in "
            f"cluster.toml",
            "the job ends at start-up",
            "make them agree (key 'processes')",
        )
