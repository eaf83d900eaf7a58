"""Reads this process's rank from the environment of torchrun, the deepspeed launcher, srun or mpirun.

It also checks the hostfile of the deepspeed launcher against the nodes of cluster.toml. A rank finds the
hosts in the command line of its parent process:

    deepspeed --hostfile FILE train.py ...                              reads FILE, and on each host starts
      -> python -m deepspeed.launcher.launch --world_info=BASE64 ...    with e.g. {"a0": [0, 1], "b0": [0, 1]}
           -> python train.py ...                                       a rank
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError
from holmes_ext.words import counted


@dataclass(frozen=True)
class Process:
    """Rank, local rank and sizes of the job of this process, as its launcher numbered them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int  # 0 if the launcher does not say it
    master_addr: str
    master_port: int
    launcher: str  # name, for messages
    agent_store: bool = False  # whether torchrun's agent hosts the job's store, instead of rank 0

    def __post_init__(self) -> None:
        """Raise HolmesError if the rank is not below the world size."""
        if not 0 <= self.rank < self.world_size:
            raise HolmesError(
                f"{self.launcher}: rank {self.rank} is not below the world size {self.world_size}"
            )


class _Variables(NamedTuple):
    """Names of a launcher's environment variables."""

    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


NONE = "no launcher"
_HYDRA = "mpirun (Hydra)"
_SRUN = "srun"
_JOB_NODES = "SLURM_JOB_NODELIST"
_DEFAULT_PORT = 29500  # torch's default for MASTER_PORT
_LOCAL_ADDRESS = "127.0.0.1"
#: Ports for Slurm jobs without MASTER_PORT: the first, and how many.
_FIRST_SLURM_PORT = 10000
_SLURM_PORT_COUNT = 20000
#: Launchers and their variables, in the order of the search. mpirun comes before srun:
#: inside a Slurm allocation, mpirun starts its daemons by srun, so its ranks have Slurm's variables of
#: the daemon, too.
VARIABLES = {
    "mpirun (Open MPI)": _Variables(
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _HYDRA: _Variables(
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    ),
    _SRUN: _Variables(
        rank="SLURM_PROCID",
        world_size="SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_NTASKS_PER_NODE",
    ),
}
#: Variables that training scripts read their rank from. PMI_RANK and PMIX_RANK are not among them: the MPI
#: library needs their original values.
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def detect(environ: Mapping[str, str]) -> Process:
    """Return rank, world size and address of rank 0, as this process's launcher has set them.

    Launchers set environment variables: torchrun's, or those of srun or an mpirun (VARIABLES). Without
    a launcher, this is the only process of a job.

    Raises:
        HolmesError: A variable of the launcher is missing, or is no number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _from_torch(environ)
    # A batch script has SLURM_PROCID=0, too, but only processes that srun starts are in a step.
    is_in_step = "SLURM_STEP_ID" in environ
    for launcher, names in VARIABLES.items():
        if names.rank not in environ or names.world_size not in environ:
            continue
        if launcher == _SRUN and not is_in_step:
            continue  # a batch script, not started by srun
        if launcher == _HYDRA and is_in_step and names.local_rank not in environ:
            continue  # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, as Hydra's mpirun does
        return _from_mpi_like(environ, launcher, names)
    return Process(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_addr=_LOCAL_ADDRESS,
        master_port=0,
        launcher=NONE,
    )


def _number(
    environ: Mapping[str, str], name: str, launcher: str, default: int | None = None
) -> int:
    """Return the number in an environment variable of a launcher.

    Args:
        environ: Environment variables.
        name: Name of the variable.
        launcher: Name of the launcher, for the error message.
        default: Returned if the variable is not set; None if it must be set.

    Raises:
        HolmesError: The variable is no number, or it is not set and has no default.
    """
    if name not in environ and default is not None:
        return default
    text = environ.get(name, "")
    if not text.isdecimal():
        state = f"is {text!r}, not a number" if text else "is not set"
        raise HolmesError(f"{launcher}: environment variable {name} {state}")
    return int(text)


def _from_torch(environ: Mapping[str, str]) -> Process:
    """Return rank, world size and address of rank 0 from RANK, WORLD_SIZE, MASTER_ADDR and so on.

    torchrun, the deepspeed launcher or the user sets these environment variables.

    Raises:
        HolmesError: A variable is missing, or is no number.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    elif "CROSS_RANK" in environ:  # only the deepspeed launcher sets it
        launcher = "deepspeed"
    else:
        launcher = "environment"
    world_size = _number(environ, "WORLD_SIZE", launcher)
    if world_size > 1 and not environ.get("MASTER_ADDR"):
        raise HolmesError(
            f"{launcher}: environment variable MASTER_ADDR is not set; it names rank 0's host"
        )
    default_local_rank = 0 if world_size == 1 else None  # None: LOCAL_RANK must be set
    local_size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "LOCAL_SIZE"
    return Process(
        rank=_number(environ, "RANK", launcher),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", launcher, default=default_local_rank),
        local_world_size=_number(environ, local_size_name, launcher, default=0),
        master_addr=environ.get("MASTER_ADDR", _LOCAL_ADDRESS),
        master_port=_number(environ, "MASTER_PORT", launcher, default=_DEFAULT_PORT),
        launcher=launcher,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_mpi_like(environ: Mapping[str, str], launcher: str, names: _Variables) -> Process:
    """Return rank, world size and address of rank 0 of a process that srun or mpirun started.

    Args:
        environ: Environment variables.
        launcher: Name of the launcher.
        names: Names of the launcher's variables.

    Raises:
        HolmesError: A variable is missing, or is no number.
    """
    master_addr = environ.get("MASTER_ADDR", "")
    if not master_addr:
        if launcher == _SRUN:
            master_addr = _first_node_of_step(environ)
        else:
            master_addr = _first_node_of_job(environ)
    world_size = _number(environ, names.world_size, launcher)
    if world_size > 1 and not master_addr:
        raise HolmesError(
            f"{launcher}: environment variable MASTER_ADDR is not set; export the name of rank 0's host"
        )
    default_port = _DEFAULT_PORT
    job_id = environ.get("SLURM_JOB_ID", "")
    if job_id.isdecimal():
        # Each Slurm job has its own port, as in the launch scripts of PyTorch's Slurm examples.
        default_port = _FIRST_SLURM_PORT + int(job_id) % _SLURM_PORT_COUNT

    # Ranks on this node, as text. "0" stands for an unknown number.
    local_size_text = environ.get(names.local_world_size, "0")
    # Slurm may append the number of nodes, as in "8(x4)".
    local_size_text = re.sub(r"\(x\d+\)$", "", local_size_text)
    if launcher == _SRUN and _number(environ, "SLURM_HET_SIZE", launcher, default=0) > 1:
        # In a heterogeneous job, SLURM_NTASKS_PER_NODE is that of the job's first component on all
        # nodes. So it may be wrong for this node.
        local_size_text = "0"
    local_size = _number(
        {names.local_world_size: local_size_text}, names.local_world_size, launcher
    )
    return Process(
        rank=_number(environ, names.rank, launcher),
        world_size=world_size,
        local_rank=_number(environ, names.local_rank, launcher),
        local_world_size=local_size,
        master_addr=master_addr or _LOCAL_ADDRESS,
        master_port=_number(environ, "MASTER_PORT", launcher, default=default_port),
        launcher=launcher,
    )


def _first_node_of_job(environ: Mapping[str, str]) -> str:
    """Return the first node of the Slurm job of this mpirun; "" outside of Slurm.

    mpirun takes the job's nodes in order. The nodes of the Slurm step are not used: the step belongs to
    mpirun's daemons.
    """
    nodes = expand(environ.get(_JOB_NODES, ""), f"environment variable {_JOB_NODES}")
    return nodes[0] if nodes else ""


def _first_node_of_step(environ: Mapping[str, str]) -> str:
    """Return the node of rank 0 of the processes that srun started; "" if Slurm's variables do not name it.

    srun numbers its tasks from the first node of the step's list on. There are two exceptions:

        heterogeneous job          the list is sorted; numbers begin at the first node of the first component
        --distribution=arbitrary   numbers follow the lines of SLURM_HOSTFILE

    Raises:
        HolmesError: The file that SLURM_HOSTFILE should name is not set or cannot be read.
    """
    if environ.get("SLURM_DISTRIBUTION") == "arbitrary":
        return _first_host_in(environ.get("SLURM_HOSTFILE", ""))
    list_name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else _JOB_NODES

    # expand() turns Slurm's "node[1-3]" into a list of names.
    nodes = expand(environ.get(list_name, ""), f"environment variable {list_name}")
    # A heterogeneous job has several components, each with a list of nodes. Tasks are numbered by
    # component, so rank 0 is in the first component that has a node in this step. In other jobs the
    # loop does nothing: SLURM_HET_SIZE is not set.
    for component in range(_number(environ, "SLURM_HET_SIZE", _SRUN, default=0)):
        for kind in ("HET", "PACK"):  # PACK: the name before Slurm 20.02
            variable = f"SLURM_JOB_NODELIST_{kind}_GROUP_{component}"
            if variable not in environ:
                continue
            component_nodes = expand(environ[variable], f"environment variable {variable}")
            step_nodes = [node for node in component_nodes if node in nodes]
            if step_nodes:
                return step_nodes[0]
            break  # PACK is only an older name of the same variable: go on with the next component
    return nodes[0] if nodes else ""


def _first_host_in(path: str) -> str:
    """Return the host in the first line of srun's hostfile that is not empty; "" if all lines are.

    Raises:
        HolmesError: The path is empty, or the file cannot be read.
    """
    advice = "export MASTER_ADDR, the host of its first line, for all ranks"
    if not path:
        raise HolmesError(
            f"srun --distribution=arbitrary: SLURM_HOSTFILE is not set where the ranks run; {advice}"
        )
    for line in read_text(path, advice).splitlines():
        if line.strip():
            return line.strip()
    return ""


def exported(process: Process, rank: int, processes: int) -> dict[str, str]:
    """Return torchrun's environment variables for a process whose rank holmes has changed.

    Args:
        process: The process, as its launcher numbered it.
        rank: New rank of the process.
        processes: Processes on the node of the process.
    """
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
    """Return the hosts and their numbers of processes that the deepspeed launcher has read from its hostfile.

    The launcher on each node has them in its command line, in an argument --world_info.

    Args:
        pid: Process id of the launcher; None for the parent of this process.

    Returns:
        Host -> processes, in the hostfile's order. It is empty if the process is no deepspeed launcher.
    """
    launcher_pid = os.getppid() if pid is None else pid
    try:
        command_line = Path(f"/proc/{launcher_pid}/cmdline").read_bytes()
    except OSError:
        return {}
    arguments = command_line.decode(errors="replace").split("\0")  # as /proc separates them
    for argument, next_argument in zip(arguments, [*arguments[1:], ""]):
        name, equals, value = argument.partition("=")
        if name == _WORLD_INFO:  # written with "=", or followed by its value
            return _processes_of_hosts(value if equals else next_argument)
    return {}


def _processes_of_hosts(world_info: str) -> dict[str, int]:
    """Return the number of processes of each host in the value of deepspeed's flag --world_info.

    The value is JSON in base64: {host: [GPU numbers]}. The result is empty if the value is something else,
    because it belongs to another program's flag of the same name.
    """
    try:
        gpus_of_hosts = json.loads(base64.urlsafe_b64decode(world_info))
        return {host: len(gpus) for host, gpus in gpus_of_hosts.items()}
    except (ValueError, AttributeError, TypeError):
        return {}


def check_hosts(hosts: dict[str, int], spec: SiteSpec) -> None:
    """Check that a hostfile and cluster.toml may describe the same nodes.

    A host with a name that cluster.toml does not have may be an alias of a node. So it is an error only if
    there are more hosts than nodes.

    Args:
        hosts: Host -> processes, from the hostfile of the deepspeed launcher. Empty: nothing is checked.
        spec: The content of cluster.toml.

    Raises:
        HolmesError: They contradict each other.
    """
    if not hosts:
        return
    known_names: dict[str, str] = {}  # host -> its name in cluster.toml
    for host in hosts:
        name = spec.known_as(host)  # "" if cluster.toml has no such node
        if name:
            known_names[host] = name
    node_count = len(spec.cluster_by_node)
    if len(hosts) > node_count:
        extra = next(host for host in hosts if host not in known_names)
        raise HolmesError(
            f"the deepspeed launcher's hostfile has {counted(len(hosts), 'host')}, "
            f"{spec.source} {counted(node_count, 'node')}: host {extra!r} is in no cluster; "
            "add it to a cluster's nodes, or take it out of the hostfile"
        )
    for host, name in known_names.items():
        cluster = spec.cluster_of(name)
        if hosts[host] != cluster.processes:
            raise HolmesError(
                f"the deepspeed launcher's hostfile starts {counted(hosts[host], 'process')} on {host!r}, "
                f"but in {spec.source} key 'cluster.{cluster.name}.processes' is {cluster.processes}; make "
                "the slots and the key agree"
            )
