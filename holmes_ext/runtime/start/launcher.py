"""Who this process is, by the environment of torchrun, the deepspeed launcher, srun or mpirun.

The deepspeed launcher's hostfile is checked, as far as a rank can see it: are its hosts the nodes of
cluster.toml?

    deepspeed --hostfile FILE train.py ...                              reads FILE, reaches every host of it
      -> python -m deepspeed.launcher.launch --world_info=BASE64 ...    on each host: {"a0":
                                                                        [0, 1], "b0": [0, 1]}
           -> python train.py ...                                       a rank; the hosts are
                                                                        in its parent's command
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError


@dataclass(frozen=True)
class Process:
    """Identity as the launcher gave it. local_world_size 0: the launcher does not say."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str
    agent_store: bool = False

    def __post_init__(self):
        if not 0 <= self.rank < self.world_size:
            raise HolmesError(
                f"{self.launcher}: rank {self.rank} is not below the world size {self.world_size}"
            )


NONE = "no launcher"
_JOB_NODES = "SLURM_JOB_NODELIST"
#: For each launcher: names of rank, world size, local rank, local world size. mpirun inside a Slurm
#: allocation starts its own daemons by srun, so its ranks have Slurm's variables too, those of the daemon:
#: mpirun's come first.
VARIABLES = {
    "mpirun (Open MPI)": tuple(
        f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ),
    "mpirun (Hydra)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}
#: What scripts read to learn their rank; the MPI library's own (PMI_RANK, PMIX_RANK) stay as they are.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def detect(environ: Mapping[str, str]) -> Process:
    """The Process of `environ`, a single one without a launcher; HolmesError: variables are missing or no
    numbers."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torch(environ)
    in_step = "SLURM_STEP_ID" in environ  # what srun starts; a batch script has SLURM_PROCID=0 too
    for launcher, names in VARIABLES.items():
        pmi_of_srun = (
            launcher == "mpirun (Hydra)" and in_step and names[2] not in environ
        )  # srun --mpi=pmi2
        if (
            names[0] in environ
            and names[1] in environ
            and not pmi_of_srun
            and (in_step or launcher != "srun")
        ):
            return _from_mpi_like(environ, launcher, names)
    return Process(0, 1, 0, 1, "127.0.0.1", 0, NONE)


def _number(
    environ: Mapping[str, str], name: str, launcher: str, default: int | None = None
) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        state = f"is {text!r}, not a number" if text else "is not set"
        raise HolmesError(f"{launcher}: environment variable {name} {state}")
    return int(text)


def _from_torch(environ: Mapping[str, str]) -> Process:
    by = {"TORCHELASTIC_RUN_ID": "torchrun", "CROSS_RANK": "deepspeed"}
    launcher = next((name for variable, name in by.items() if variable in environ), "environment")
    world_size = _number(environ, "WORLD_SIZE", launcher)
    if world_size > 1 and not environ.get("MASTER_ADDR"):
        raise HolmesError(
            f"{launcher}: environment variable MASTER_ADDR is not set; it names rank 0's host"
        )
    local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "LOCAL_SIZE"
    return Process(
        rank=_number(environ, "RANK", launcher),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", launcher, 0 if world_size == 1 else None),
        local_world_size=_number(environ, local_size, launcher, 0),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT", launcher, 29500),
        launcher=launcher,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_mpi_like(environ: Mapping[str, str], launcher: str, names: tuple[str, ...]) -> Process:
    rank, size, local, per_node = names
    address = environ.get("MASTER_ADDR") or (
        _first_of_step if launcher == "srun" else _first_of_job
    )(environ)
    world_size = _number(environ, size, launcher)
    if world_size > 1 and not address:
        raise HolmesError(
            f"{launcher}: environment variable MASTER_ADDR is not set; export the name of rank 0's host"
        )
    # Without MASTER_PORT: one port for each Slurm job, as in the launch scripts of PyTorch's Slurm examples.
    port = (
        10000 + int(environ["SLURM_JOB_ID"]) % 20000
        if environ.get("SLURM_JOB_ID", "").isdecimal()
        else 29500
    )
    return Process(
        rank=_number(environ, rank, launcher),
        world_size=world_size,
        local_rank=_number(environ, local, launcher),
        local_world_size=_number(
            {per_node: re.sub(r"\(x\d+\)$", "", environ.get(per_node, "0"))}, per_node, launcher
        ),
        master_addr=address or "127.0.0.1",
        master_port=_number(environ, "MASTER_PORT", launcher, port),
        launcher=launcher,
    )


def _first_of_job(environ: Mapping[str, str]) -> str:
    """Of an mpirun inside a Slurm job, which takes its nodes in order; else "". (The step is its
    daemons'.)"""
    return next(iter(expand(environ.get(_JOB_NODES, ""), f"environment variable {_JOB_NODES}")), "")


def _first_of_step(environ: Mapping[str, str]) -> str:
    """The host of rank 0 of what srun started. HolmesError where Slurm does not tell.

    srun numbers tasks from the first node of the step's list on; of a heterogeneous step's (which is sorted)
    from the first one of its first component; with --distribution=arbitrary as the lines of SLURM_HOSTFILE
    stand.
    """
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        return _first_of_hostfile(environ.get("SLURM_HOSTFILE", ""))
    name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else _JOB_NODES
    nodes = expand(environ.get(name, ""), f"environment variable {name}")
    for group in range(_number(environ, "SLURM_HET_SIZE", "srun", 0)):
        variables = (f"SLURM_JOB_NODELIST_{kind}_GROUP_{group}" for kind in ("HET", "PACK"))
        variable = next((name for name in variables if name in environ), None)
        members = expand(environ[variable], f"environment variable {variable}") if variable else []
        if here := [node for node in members if node in nodes]:
            return here[0]
    return nodes[0] if nodes else ""


def _first_of_hostfile(path: str) -> str:
    """The first line's host."""
    advice = "export MASTER_ADDR, the host of its first line, for all ranks"
    if not path:
        raise HolmesError(
            f"srun --distribution=arbitrary: SLURM_HOSTFILE is not set where the ranks run; {advice}"
        )
    lines = [line.strip() for line in read_text(path, advice).splitlines()]
    return next((line for line in lines if line), "")


def exported(process: Process, rank: int, processes: int) -> dict[str, str]:
    """Environment variables, torchrun's, of `process` as `rank` on a node with `processes` of them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(process.world_size),
        "LOCAL_RANK": str(process.local_rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": process.master_addr,
        "MASTER_PORT": str(process.master_port),
    }


_WORLD_INFO = "--world_info"


def launched_hosts(pid: int | None = None) -> dict[str, int]:
    """Host -> processes, in order, of a deepspeed launcher `pid` (default: the parent); else empty."""
    place = Path("/proc", str(os.getppid() if pid is None else pid), "cmdline")
    try:
        arguments = place.read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    for item, following in zip(arguments, [*arguments[1:], ""]):
        name, equals, value = item.partition("=")
        if name == _WORLD_INFO:
            return _slots_of_hosts(value if equals else following)
    return {}


def _slots_of_hosts(text: str) -> dict[str, int]:
    try:
        return {
            host: len(slots) for host, slots in json.loads(base64.urlsafe_b64decode(text)).items()
        }
    except (ValueError, AttributeError, TypeError):
        return {}  # another program's flag of that name


def check_hosts(hosts: dict[str, int], spec: SiteSpec) -> None:
    """HolmesError when hostfile and cluster.toml cannot be the same nodes (aliases may be meant)."""
    if not hosts:
        return
    known = {host: name for host in hosts if (name := spec.known_as(host))}
    count = len(spec.owner)
    counts = (
        f"the deepspeed launcher's hostfile has {len(hosts)} hosts, {spec.source} {count} nodes"
    )
    if len(hosts) > count:
        extra = next(name for name in hosts if name not in known)
        way_out = "add it to a cluster's nodes, or take it out of the hostfile"
        raise HolmesError(f"{counts}: host {extra!r} is in no cluster; {way_out}")
    for host, name in known.items():
        cluster = spec.cluster_of(name)
        if hosts[host] != cluster.processes:
            key = f"in {spec.source} key 'cluster.{cluster.name}.processes' is {cluster.processes}"
            started = (
                f"the deepspeed launcher's hostfile starts {hosts[host]} processes on {host!r}"
            )
            raise HolmesError(f"{started}, but {key}; make the slots and the key agree")
