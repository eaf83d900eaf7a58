"""A Slurm allocation before the job starts: its nodes, and the srun that reaches each once."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of


def srun(environ: Mapping[str, str], options: str, program: Sequence[str]) -> list[str]:
    """The command that runs `program` once on every node of the allocation in `environ`, or of one that
    `options` (srun's) ask for. HolmesError: neither is there."""
    try:
        words = shlex.split(options)
    except ValueError as error:
        raise HolmesError(f"--slurm {options!r:.80}: {error}") from None
    inside = "SLURM_JOB_ID" in environ
    if not inside and not words:
        raise HolmesError(
            "--slurm: this is no allocation; run it inside one (salloc, a batch script), or "
            "say what to ask for: --slurm='--nodes 4 --partition gpu'"
        )
    components = int(environ.get("SLURM_HET_SIZE", "1")) if inside else 1
    het_groups = [f"--het-group=0-{components - 1}"] if components > 1 else []
    return ["srun", *het_groups, *words, "--ntasks-per-node=1", "--kill-on-bad-exit=0", *program]


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the job's number of processes, for which srun ignores --ntasks-per-node."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SLURM_NTASKS", "SLURM_NPROCS"))
    }


def allocated(environ: Mapping[str, str]) -> list[str]:
    """The nodes of the allocation, of all its components; empty outside of one."""
    names = [
        "SLURM_JOB_NODELIST",
        *(
            f"SLURM_JOB_NODELIST_HET_GROUP_{group}"
            for group in range(int(environ.get("SLURM_HET_SIZE", "0")))
        ),
    ]
    return list(
        dict.fromkeys(
            node
            for name in names
            for node in expand(environ.get(name, ""), f"environment variable {name}")
        )
    )


def check_nodes(nodes: Sequence[str], spec: SiteSpec) -> None:
    """HolmesError where the allocation has nodes that the file does not know."""
    if strangers := [node for node in nodes if not spec.known_as(node)]:
        way_out = f"add it to one, or: holmes discover --from slurm --output {spec.source}"
        raise HolmesError(
            f"{spec.source}: no cluster has node {some_of(strangers, 4)} of the allocation; {way_out}"
        )
