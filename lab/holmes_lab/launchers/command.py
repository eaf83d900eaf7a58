"""Builds the command line of a launcher that starts a job on all nodes of an emulated cluster.

    holmes lab run --launcher srun -- python train.py
        runs   srun --nodes=4 --ntasks-per-node=2 ... python train.py   on the login host
    holmes lab run --launcher srun -- sbatch --wait job.sh
        runs   sbatch --wait job.sh                                     on the login host

A command that already begins with one of the launcher's programs, such as sbatch, is not changed. Commands
run on the login host, except that torchrun runs on every node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_lab.lab import Lab
from holmes_lab.launchers.daemons import Daemons
from holmes_lab.network.shaping import LOGIN
from holmes_lab.process import ranks
from holmes_lab.process.job import Job
from holmes_lab.rights import PACKAGES, program

#: Launcher -> the services that it needs on the nodes.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "torchrun": (),
    "srun": ("slurm",),
    "mpirun": ("ssh",),
    "deepspeed": ("ssh",),
}
#: Launcher -> programs that start a job themselves, so a command that begins with one is not changed.
_LAUNCHER_PROGRAMS = {
    "torchrun": ("torchrun",),
    "srun": ("srun", "sbatch", "salloc", "scontrol", "sinfo", "squeue", "scancel"),
    "mpirun": ("mpirun", "mpiexec", "ssh", "pdsh"),
    "deepspeed": ("deepspeed", "ds", "dsr", "ssh", "pdsh"),
}
#: Python module -> the launcher program that it implements.
_LAUNCHER_OF_MODULE = {
    "torch.distributed.run": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
}
_STORE_PORT = 29500
_RENDEZVOUS_PORT = 29400


def start_with_launcher(
    lab: Lab,
    launcher: str,
    command: Sequence[str],
    *,
    order: Sequence[str] | None,
    processes: int | None,
    env: Mapping[str, str],
    accelerator: Mapping[str, Any] | None,
    **options: Any,
) -> tuple[Job, list[str]]:
    """Start `command` with a real launcher (torchrun, srun, mpirun or deepspeed) on emulated nodes.

    torchrun is started on every node. The other launchers are started once, on the login host, and
    start the processes on the nodes from there.

    Args:
        lab: The emulated cluster, with a login host.
        launcher: Name of the launcher.
        command: The user's command with its arguments.
        order: Names of the nodes to use, in this order; None for all nodes.
        processes: Processes on each node; None for the number in the cluster file.
        env: Variables that are added to the environment of all processes.
        accelerator: Settings of the emulated accelerator; None without one.
        options: Passed to Lab.start_programs.

    Returns:
        The running job and the hosts of its "ranks". Each "rank" is a program of the launcher.
    """
    if order is None:
        nodes = list(lab.nodes)
    else:
        nodes = [node for node in lab.nodes if node.name in order]
        nodes.sort(key=lambda node: order.index(node.name))
    counts = ranks.processes_of_nodes(nodes, processes)
    if launcher in PACKAGES and not starts_itself(launcher, command):
        program(launcher)  # raises a HolmesError that names the package to install
    node_names = [node.name for node in nodes]
    daemons = Daemons(
        lab,
        NEEDS[launcher],
        order=node_names,
        processes=processes,
        env=env,
        accelerator=accelerator,
    )
    hosts = node_names if launcher == "torchrun" else [LOGIN]
    programs = []  # each runs the launcher on one host
    for position, host in enumerate(hosts):
        argv = command_line(launcher, node_names, counts, command, daemons.directory, position)
        programs.append(daemons.program(argv, host))
    return lab.start_programs(programs, **options), hosts


def starts_itself(launcher: str, command: Sequence[str]) -> bool:
    """Return whether a command begins with a program of the launcher, so that it starts the job itself."""
    words = [Path(word).name for word in command]
    if words[0].startswith("python") and words[1:2] == ["-m"]:
        module = words[2:3][0]
        return _LAUNCHER_OF_MODULE.get(module, "") in _LAUNCHER_PROGRAMS[launcher]
    return words[0] in _LAUNCHER_PROGRAMS[launcher]


def command_line(
    launcher: str,
    nodes: Sequence[str],
    counts: Sequence[int],
    command: Sequence[str],
    directory: Path,
    position: int = 0,
) -> list[str]:
    """Return the command line of a launcher that starts `command` on the nodes.

    Args:
        launcher: "torchrun", "srun", "mpirun" or "deepspeed".
        nodes: Names of the nodes in the order of their ranks.
        counts: Number of processes on each node.
        command: The user's command. It is returned unchanged if it already begins with the launcher.
        directory: Directory for the hostfile that mpirun and deepspeed read.
        position: Position of the node that runs the line (for torchrun, since it runs on every node).

    Raises:
        HolmesError: The launcher cannot start this command.
    """
    if starts_itself(launcher, command):
        return list(command)
    if launcher == "torchrun":
        return [
            *_launcher_of_python(command, "torchrun", module="torch.distributed.run"),
            f"--nnodes={len(nodes)}",
            f"--nproc-per-node={counts[position]}",
            "--rdzv-backend=c10d",
            "--rdzv-id=lab",
            f"--rdzv-endpoint={nodes[0]}:{_RENDEZVOUS_PORT}",
            "--no-python",
            *command,
        ]
    if launcher == "srun":
        return _srun_command_line(nodes, counts, command)
    hostfile = directory / "hostfile"
    hostfile.write_text("".join(f"{name} slots={count}\n" for name, count in zip(nodes, counts)))
    if launcher == "mpirun":
        return _mpirun_command_line(nodes, sum(counts), command, hostfile)
    return _deepspeed_command_line(command, hostfile)


def _srun_command_line(
    nodes: Sequence[str], counts: Sequence[int], command: Sequence[str]
) -> list[str]:
    """Return the command line of srun, of a heterogeneous job if nodes have different numbers of tasks.

    Each component of the job consists of nodes that follow each other and have equally many tasks:
    nodes with 8, 8, 4 and 8 tasks are three components. With a single component it is an ordinary job.
    """
    words = ["srun"]
    for count, component in groupby(zip(nodes, counts), key=lambda pair: pair[1]):
        names = [name for name, _ in component]
        if len(words) > 1:
            words.append(":")
        words += [
            f"--nodes={len(names)}",
            f"--nodelist={','.join(names)}",
            f"--ntasks-per-node={count}",
            f"--gpus-per-node={count}",
            "--kill-on-bad-exit=1",
        ]
    return [*words, *command]


def _mpirun_command_line(
    nodes: Sequence[str], processes: int, command: Sequence[str], hostfile: Path
) -> list[str]:
    return [
        "mpirun",
        "--allow-run-as-root",
        "--hostfile",
        str(hostfile),
        "-np",
        str(processes),
        "--bind-to",
        "none",
        "-x",  # exports a variable to all processes
        f"MASTER_ADDR={nodes[0]}",
        "-x",
        f"MASTER_PORT={_STORE_PORT}",
        "-x",
        "PATH",
        *command,
    ]


def _deepspeed_command_line(command: Sequence[str], hostfile: Path) -> list[str]:
    """Return the command line of deepspeed for a command of the form `python SCRIPT ...`.

    Raises:
        HolmesError: The command has another form: deepspeed starts only scripts.
    """
    is_python = Path(command[0]).name.startswith("python")
    has_script = len(command) > 1 and not command[1].startswith("-")
    if not is_python or not has_script:
        raise HolmesError(
            f"--launcher deepspeed: the command must be `python SCRIPT ...`, not"
            f" {' '.join(command[:2])!r:.80}: deepspeed starts scripts"
        )
    return [
        *_launcher_of_python(command, "deepspeed", module="deepspeed.launcher.runner"),
        "--hostfile",
        str(hostfile),
        "--force_multi",
        *command[1:],
    ]


def _launcher_of_python(command: Sequence[str], name: str, *, module: str) -> list[str]:
    """Return the words that start a launcher, with the Python interpreter that the command names.

    Without an interpreter in the command, the launcher is the program `name` on PATH.
    """
    if Path(command[0]).name.startswith("python"):
        return [command[0], "-m", module]
    return [name]
