"""What is wrong with a training command, without starting it: script, flags, sizes against the clusters, ds_config, hostfile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.errors import HolmesError
from holmes_ext.options import PREFIX, Options, parse_flags
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.plan import Plan, check_plan, load_plan
from holmes_ext.plan.sizes import parse_sizes

_MODULE_SWITCH = "-m"


@dataclass(frozen=True)
class Command:
    """launcher: words before the script; script: its path, "" where a module is started; arguments: what the script gets."""

    launcher: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]


def split_command(words: Sequence[str]) -> Command:
    """The training script of a launcher's command line: its first word that ends in .py, else the module after the last -m."""
    for number, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return Command(tuple(words[:number]), word, tuple(words[number + 1 :]))
    if _MODULE_SWITCH in words:
        number = len(words) - 1 - list(words)[::-1].index(_MODULE_SWITCH) + 2
        return Command(tuple(words[:number]), "", tuple(words[number:]))
    raise HolmesError(f"holmes doctor -- {' '.join(words)[:80]}: no training script (FILE.py, or -m MODULE) in the command; give the whole command")


def check_command(words: Sequence[str], spec: SiteSpec | None, environ: Mapping[str, str]) -> list[Finding]:
    """Findings on a command line. `spec`: of --cluster; else what the command's own --holmes-cluster names."""
    from holmes_ext.doctor import frameworks as health

    command = split_command(words)
    findings: list[Finding] = []
    if command.launcher and not shutil.which(command.launcher[0]):
        findings.append(problem(command.launcher[0], "there is no such program", "the command cannot start", "install it, or give its path"))
    if command.script and not Path(command.script).is_file():
        findings.append(
            problem(command.script, "there is no such file", "the command cannot start", f"give the script's path from here ({os.getcwd()})")
        )
    elif command.script:
        findings += health.check_script(Path(command.script)) + health.check_megatron_deepspeed(Path(command.script).resolve().parent)
    try:
        options, rest = parse_flags(list(command.arguments), environ)
    except HolmesError as error:
        return [*findings, _stops("the command's flags", error)]
    if not _switched_on(command, environ):
        findings.append(
            problem(
                "the command",
                f"{PREFIX} is not among the script's arguments and HOLMES is not set",
                "holmes does nothing in this job",
                f"add {PREFIX} after the script's name",
            )
        )
    try:
        spec = spec or (load_spec(options.cluster) if options.cluster else None)
    except HolmesError as error:
        return [*findings, _stops("--holmes-cluster", error)]
    return findings + _check_plan(command, options, rest, spec)


def _switched_on(command: Command, environ: Mapping[str, str]) -> bool:
    module = "holmes_ext" in command.launcher
    return module or environ.get("HOLMES", "") not in ("", "0") or any(word == PREFIX or word.startswith(f"{PREFIX}-") for word in command.arguments)


def _stops(about: str, error: HolmesError) -> Finding:
    return problem(about, str(error), "the job ends at start-up with this line", "mend it as the line says")


def _check_plan(command: Command, options: Options, rest: list[str], spec: SiteSpec | None) -> list[Finding]:
    from holmes_ext.patches.deepspeed import ds_config
    from holmes_ext.patches.megatron import arguments

    findings: list[Finding] = []
    try:
        sizes = parse_sizes(options.sizes, "--holmes-sizes") if options.sizes else arguments.sizes_from_arguments(rest)
        config = ds_config.from_arguments(rest)
        if config is not None and not config.digest:
            findings.append(
                problem(config.path, "cannot be read as JSON", "DeepSpeed ends with an error", "give --deepspeed_config an existing JSON file")
            )
        if spec is None:
            findings.append(
                note(
                    "clusters",
                    "no cluster.toml is known, so sizes are not checked against the clusters",
                    "holmes works the clusters out at start-up",
                    "give --cluster FILE",
                )
            )
            return findings
        site = site_from_spec(spec)
        plan = check_plan(load_plan(options.plan), site) if options.plan else build_plan(site, sizes)
        if config is not None and config.digest:
            lines = ds_config.check(config, plan, options.overlap if options.overlap != "auto" else None)
            findings += [note(config.path, line, "the setting does nothing", "remove it") for line in lines]
        findings += _straddling(plan) + _check_launcher(command, site)
    except HolmesError as error:
        findings.append(_stops("the command", error))
    return findings


def _straddling(plan: Plan) -> list[Finding]:
    return [
        note(
            f"{s.kind} groups",
            f"{s.groups} of them straddle clusters and go over {s.fabric}",
            "their traffic is as slow as that network",
            "look at `holmes plan` for sizes under which none does",
        )
        for s in plan.straddling
    ]


def _check_launcher(command: Command, site: Site) -> list[Finding]:
    """Number of nodes and of processes for each that the launcher's own options name."""
    given = {
        word.partition("=")[0].replace("_", "-"): word.partition("=")[2] or following
        for word, following in zip(command.launcher, [*command.launcher[1:], ""])
    }
    findings = []
    nodes = given.get("--nnodes", "")
    if nodes.isdecimal() and int(nodes) != len(site.nodes):
        findings.append(
            problem(
                "--nnodes",
                f"is {nodes}, but the clusters have {len(site.nodes)} nodes",
                "the job waits for ranks that never come, or ends at start-up",
                "start it on all nodes of cluster.toml, or take nodes out of the file",
            )
        )
    processes = next((given[name] for name in ("--nproc-per-node", "--num-gpus") if given.get(name, "").isdecimal()), "")
    wrong = [node.name for node in site.nodes if processes and node.processes != int(processes)]
    if wrong:
        findings.append(
            problem(
                "--nproc-per-node",
                f"is {processes}, but node {wrong[0]} has {site.node_by_name[wrong[0]].processes} processes in cluster.toml",
                "the job ends at start-up",
                "make them agree (key 'processes')",
            )
        )
    return findings
