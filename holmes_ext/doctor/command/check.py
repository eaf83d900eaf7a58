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

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.doctor.command.command_words import split_command
from holmes_ext.doctor.command.forwarded import check_forwarded
from holmes_ext.doctor.command.launch import LaunchedNodes, read_launches
from holmes_ext.doctor.command.launch_check import (
    check_gpus,
    check_launch,
    check_launchers,
    node_count,
    started_part,
    with_own_name,
)
from holmes_ext.doctor.command.launch_options import (
    allocation_variables,
    exported_variables,
    gpus_on_node,
)
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.doctor.frameworks import check_megatron_deepspeed, check_script
from holmes_ext.doctor.no_file import check_prefix_of_job
from holmes_ext.errors import HolmesError
from holmes_ext.options import PREFIX, Options, misspelt_flag, parse_flags
from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.megatron.command_line.describe import describe, sizes_from_arguments
from holmes_ext.patches.megatron.command_line.refusals import refusals, refused_first_rank
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.plan import Plan, check_plan, load_plan
from holmes_ext.plan.shape import shape_of
from holmes_ext.plan.sizes import Sizes, parse_sizes
from holmes_ext.words import some_of

#: Number of words that one finding lists.
MAX_LISTED = 4


def variables_of_command(words: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that a training command sets for its ranks.

    Args:
        words: The command line.

    Raises:
        HolmesError: The command has no training script.
    """
    return exported_variables(split_command(words).launcher)


def check_command(
    words: Sequence[str],
    spec: SiteSpec | None,
    environ: Mapping[str, str],
    node: NodeReport | None = None,
) -> Iterator[Finding]:
    """Yield findings about a training command.

    Args:
        words: The command line.
        spec: Content of cluster.toml; None to take that of the command's --holmes-cluster.
        environ: Environment variables of the command.
        node: A node of the job, with its NICs; None if none is known.
    """
    command = split_command(words)
    environ = {
        **environ,
        **allocation_variables(command.launcher),
        **exported_variables(command.launcher),
    }
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
        launches = with_own_name(read_launches(command.launcher, environ), node)
        yield from check_launchers(launches)
        yield from check_gpus(launches, gpus_on_node(command.launcher, environ))
        yield from check_forwarded(launches, command.launcher, environ, has_flag)
        if spec is not None:
            yield from check_launch(launches, spec, node)
        elif node is not None:
            yield from check_prefix_of_job(node, node_count(launches))
        yield from _check_plan(command.script, launches, options, rest, spec)
    except HolmesError as error:
        yield problem(
            about,
            what=str(error),
            why="the job ends at start-up with this line",
            mend="fix it as the line says",
        )


def _check_plan(
    script: str,
    launches: Sequence[LaunchedNodes],
    options: Options,
    rest: list[str],
    spec: SiteSpec | None,
) -> Iterator[Finding]:
    """Yield findings about parallel sizes and DeepSpeed's configuration, compared with the clusters.

    Args:
        script: Path of the training script; "" if there is none.
        launches: Nodes and processes that the launchers of the command start.
        options: Values of holmes's flags (--holmes-...) in the command.
        rest: The other arguments of the script.
        spec: Content of cluster.toml; None if there is none.
    """
    sizes: Sizes | None
    if options.sizes:
        sizes = parse_sizes(options.sizes, "--holmes-sizes")
    else:
        sizes = sizes_from_arguments(rest)
    config = ds_config.from_arguments(rest)  # DeepSpeed's file; None if no argument names one
    is_config_read = config is not None and bool(config.digest)  # else missing or no JSON
    if config is not None and not is_config_read:
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

    # The command may start fewer nodes than cluster.toml has. The sizes must fit the started ones.
    started_spec = started_part(spec, launches)
    site = site_from_spec(started_spec)
    if options.plan:
        plan = check_plan(load_plan(options.plan), site)
    else:
        plan = build_plan(site, sizes)

    # With a plan or --holmes-partition, holmes assigns the layers to stages, not the framework.
    is_partitioned_by_holmes = bool(options.plan) or options.partition != "uniform"
    yield from _check_layout([script, *rest], plan, is_partitioned_by_holmes)
    if config is not None and is_config_read:
        # check() returns a line for each setting without effect. It raises HolmesError, which
        # check_command() reports, for a setting that contradicts the plan.
        for line in ds_config.check(config, plan, options.overlap):
            yield note(config.path, what=line, why="the setting does nothing", mend="remove it")
    for spanning in plan.spanning:
        yield note(
            f"{spanning.kind} groups",
            what=f"{spanning.groups} of them span clusters and go over {spanning.fabric}",
            why="their traffic is as slow as that network",
            mend="look at `holmes plan` for sizes under which none does",
        )


def _check_layout(rest: list[str], plan: Plan, is_split_by_holmes: bool) -> Iterator[Finding]:
    """Yield findings about the training script's own arguments, compared with the plan.

    The findings are about:

        - an order of the nodes that Megatron-DeepSpeed refuses
        - unknown flags that resemble a flag of holmes
        - flags that do not describe a complete model (it is then not checked further)
        - a model (layers, heads, batch, ...) that the plan's parallel sizes cannot divide

    Args:
        rest: The script and its arguments without the flags that holmes knows.
        plan: The plan of the job.
        is_split_by_holmes: Whether holmes, instead of the framework, decides how many layers each
            pipeline stage gets.
    """
    described = describe(rest)
    # Megatron-DeepSpeed requires the first rank of each node to be a multiple of the node's GPUs. This is
    # the message about a node that breaks the rule, or "".
    first_rank_message = refused_first_rank(plan)
    if first_rank_message and described.framework == "megatron-deepspeed":
        yield problem(
            "the command",
            what=first_rank_message,
            why="the framework ends with an error",
            mend="change the nodes as the line says",
        )
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
        for line in refusals(described, plan.sizes, plan.world_size, is_split_by_holmes):
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
