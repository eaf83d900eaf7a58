"""Finds the nodes of a Slurm allocation, and makes the srun command that runs a program once on each.

`holmes doctor --slurm` uses it to check all nodes of a job before it runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of

_MOST_NAMED = 4  # nodes that a message lists


def srun(environ: Mapping[str, str], options: str, program: Sequence[str]) -> list[str]:
    """Return the command that runs a program once on every node of a Slurm allocation.

    Args:
        environ: Environment variables; inside an allocation, Slurm's are among them.
        options: Options of srun. Outside of an allocation, they describe the nodes to allocate, for
            example "--nodes 4 --partition gpu".
        program: The program and its arguments.

    Raises:
        HolmesError: There is no allocation, and the options request none.
    """
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise HolmesError(f"--slurm {options!r:.80}: {error}") from None
    is_in_allocation = "SLURM_JOB_ID" in environ
    if not is_in_allocation and not words:
        raise HolmesError(
            "--slurm: this is no allocation; run it inside one (salloc, a batch script), or "
            "say what to ask for: --slurm='--nodes 4 --partition gpu'"
        )
    components = 1  # of a heterogeneous job
    if is_in_allocation:
        components = int(environ.get("SLURM_HET_SIZE", "1"))
    het_groups = [f"--het-group=0-{components - 1}"] if components > 1 else []
    return ["srun", *het_groups, *words, "--ntasks-per-node=1", "--kill-on-bad-exit=0", *program]


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for srun, without variables that make it ignore --ntasks-per-node.

    Inside a job, Slurm sets these variables to the job's number of processes.

    Args:
        environ: Environment variables of this process.
    """
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SLURM_NTASKS", "SLURM_NPROCS"))
    }


def allocated(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of the surrounding Slurm allocation; [] outside of an allocation.

    A heterogeneous job has several components, each with its own nodes: all of them count.

    Args:
        environ: Environment variables, among them Slurm's.
    """
    components = int(environ.get("SLURM_HET_SIZE", "0"))
    variables = ["SLURM_JOB_NODELIST"]
    variables += [f"SLURM_JOB_NODELIST_HET_GROUP_{component}" for component in range(components)]
    nodes: list[str] = []
    for variable in variables:
        nodes += expand(environ.get(variable, ""), f"environment variable {variable}")
    return list(dict.fromkeys(nodes))


def check_nodes(nodes: Sequence[str], spec: SiteSpec) -> None:
    """Raise HolmesError if cluster.toml does not have all nodes of the allocation.

    Args:
        nodes: Names of the nodes of the allocation.
        spec: Content of cluster.toml.
    """
    unknown = [node for node in nodes if not spec.known_as(node)]
    if unknown:
        names = some_of(unknown, _MOST_NAMED)
        raise HolmesError(
            f"{spec.source}: no cluster has node {names} of the allocation; "
            f"add it to one, or: holmes discover --from slurm --output {spec.source}"
        )
