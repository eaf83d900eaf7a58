"""Checks a training command before it runs: script, flags, sizes against the clusters, and ds_config.

`holmes doctor -- COMMAND` prints the findings. The flags are those of holmes and of the framework.
The sizes are the parallel sizes (pipeline, tensor, ...), and ds_config is DeepSpeed's configuration
file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.doctor.command_words import Command, split_command
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.doctor.frameworks import check_megatron_deepspeed, check_script
from holmes_ext.errors import HolmesError
from holmes_ext.options import PREFIX, Options, misspelt_flag, parse_flags
from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.megatron.command_line.describe import describe, sizes_from_arguments
from holmes_ext.patches.megatron.command_line.refusals import refusals
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.plan import Plan, check_plan, load_plan
from holmes_ext.plan.shape import shape_of
from holmes_ext.plan.sizes import Sizes, parse_sizes
from holmes_ext.words import some_of

#: Number of words that one finding lists.
MAX_LISTED = 4


def check_command(
    words: Sequence[str], spec: SiteSpec | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield findings about a training command.

    Args:
        words: The command line.
        spec: Content of cluster.toml; None to take that of the command's --holmes-cluster.
        environ: Environment variables of the command.
    """
    command = split_command(words)
    if command.program and not shutil.which(command.program):
        yield problem(
            command.program,
            what="there is no such program",
            why="the command cannot start",
            mend="install it, or give its path",
        )
    is_script_here = bool(command.script) and Path(command.script).is_file()
    if command.script and not is_script_here and not command.runs_elsewhere:
        yield problem(
            command.script,
            what="there is no such file",
            why="the command cannot start",
            mend=f"give the script's path from here ({os.getcwd()})",
        )
    elif is_script_here:
        yield from check_script(Path(command.script))
        yield from check_megatron_deepspeed(Path(command.script).resolve().parent)
    if command.hidden_model:
        yield note(
            "the command",
            what=command.hidden_model.partition(";")[0],
            why="its model and sizes are not checked against the clusters",
            mend=f"look at `holmes plan`, and {command.hidden_model.rpartition('; ')[2]}",
        )
    if command.unread:
        yield note(
            "the command",
            what=f"{some_of(command.unread, MAX_LISTED)} has no value here",
            why="the flag is not checked",
            mend="write the value",
        )
    about = "the command's flags"
    try:
        options, rest = parse_flags(list(command.arguments), environ)
        has_flag = any(
            word == PREFIX or word.startswith(f"{PREFIX}-") for word in command.arguments
        )
        is_wrapped = "holmes_ext" in command.launcher
        has_variable = environ.get("HOLMES", "") not in ("", "0")
        if not has_flag and not is_wrapped and not has_variable:
            yield problem(
                "the command",
                what=f"{PREFIX} is not among the script's arguments and HOLMES is not set",
                why="holmes does nothing in this job",
                mend=f"add {PREFIX} after the script's name",
            )
        about = "--holmes-cluster"
        if spec is None and options.cluster:
            spec = load_spec(options.cluster)
        about = "the command"
        yield from _check_plan(command, options, rest, spec)
    except HolmesError as error:
        yield problem(
            about,
            what=str(error),
            why="the job ends at start-up with this line",
            mend="fix it as the line says",
        )


def _check_plan(
    command: Command, options: Options, rest: list[str], spec: SiteSpec | None
) -> Iterator[Finding]:
    """Yield findings about parallel sizes and DeepSpeed's configuration, compared with the clusters.

    Args:
        command: The training command.
        options: The flags of holmes in the command.
        rest: The other arguments of the script.
        spec: Content of cluster.toml; None if there is none.
    """
    sizes: Sizes | None
    if options.sizes:
        sizes = parse_sizes(options.sizes, "--holmes-sizes")
    else:
        sizes = sizes_from_arguments(rest)
    config = ds_config.from_arguments(rest)
    if config is not None and not config.digest:
        yield problem(
            config.path,
            what="cannot be read as JSON",
            why="DeepSpeed ends with an error",
            mend="give --deepspeed_config an existing JSON file",
        )
    if spec is None:
        yield note(
            "clusters",
            what="no cluster.toml is known, so sizes are not checked against the clusters",
            why="holmes works the clusters out at start-up",
            mend="give --cluster FILE",
        )
        return
    site = site_from_spec(spec)
    if options.plan:
        plan = check_plan(load_plan(options.plan), site)
    else:
        plan = build_plan(site, sizes)
    has_own_partition = bool(options.plan) or options.partition != "uniform"
    yield from _check_layout([command.script, *rest], plan, has_own_partition)
    if config is not None and config.digest:
        for line in ds_config.check(config, plan, options.overlap):
            yield note(config.path, what=line, why="the setting does nothing", mend="remove it")
    for spanning in plan.spanning:
        yield note(
            f"{spanning.kind} groups",
            what=f"{spanning.groups} of them span clusters and go over {spanning.fabric}",
            why="their traffic is as slow as that network",
            mend="look at `holmes plan` for sizes under which none does",
        )
    yield from _check_launcher(command, site)


def _check_layout(rest: list[str], plan: Plan, partitioned: bool) -> Iterator[Finding]:
    """Yield findings about the training script's own arguments, compared with the plan.

    One finding is a model (layers, heads, ...) that the plan's parallel sizes cannot divide. The
    framework would refuse it at start-up. Another is an unknown flag that resembles one of holmes.

    Args:
        rest: The script and its arguments without the flags that holmes knows.
        plan: The plan of the job.
        partitioned: Whether holmes assigns the layers to pipeline stages, instead of the framework.
    """
    described = describe(rest)
    for word in described.unknown:  # flags in none of holmes's tables of flags
        similar = misspelt_flag(word)  # the flag of holmes that is probably meant, or ""
        if similar:
            yield problem(
                word,
                what=f"did you mean {similar}?",
                why="holmes does not read it",
                mend="write it so",
            )
    if described.trouble:
        yield note(
            "the command",
            what=described.trouble,
            why="the model's layers and heads are not compared with the sizes",
            mend="look whether the framework takes the command",
        )
    if described.model is not None and plan.sizes is not None:
        # refusals(): one sentence for each check of the framework that these sizes fail.
        for line in refusals(described, plan.sizes, plan.world_size, partitioned):
            yield problem(
                "the command",
                what=line,
                why="the framework ends with an error",
                mend="change it as the line says",
            )
        try:
            # The result is not used: shape_of() raises an error if batch, layers or experts of the
            # model do not fit these sizes.
            shape_of(described.model, plan.sizes, described.zero, described.virtual)
        except HolmesError as error:
            yield problem(
                "the command",
                what=str(error),
                why="the framework ends with an error",
                mend="change it as the line says",
            )


def _check_launcher(command: Command, site: Site) -> Iterator[Finding]:
    """Yield findings if the launcher starts other numbers of nodes or processes than cluster.toml has.

    Args:
        command: The training command.
        site: The clusters of cluster.toml.
    """
    options = {}  # name of an option of the launcher -> value
    # The value is in the same word (--nnodes=2) or in the next one (--nnodes 2).
    next_words = [*command.launcher[1:], ""]
    for word, next_word in zip(command.launcher, next_words):
        name, equals, value = word.partition("=")
        options[name.replace("_", "-")] = value if equals else next_word
    nodes = options.get("--nnodes", "")
    if nodes.isdecimal() and int(nodes) != len(site.nodes):
        yield problem(
            "--nnodes",
            what=f"is {nodes}, but the clusters have {len(site.nodes)} nodes",
            why="the job waits for ranks that never come, or ends at start-up",
            mend="start it on all nodes of cluster.toml, or take nodes out of the file",
        )
    processes = options.get("--nproc-per-node", "")
    if not processes.isdecimal():
        processes = options.get("--num-gpus", "")
    if not processes.isdecimal():
        return
    wrong = [node for node in site.nodes if node.processes != int(processes)]
    if wrong:
        yield problem(
            "--nproc-per-node",
            what=f"is {processes}, but node {wrong[0].name} has {wrong[0].processes} processes in "
            f"cluster.toml",
            why="the job ends at start-up",
            mend="make them agree (key 'processes')",
        )
