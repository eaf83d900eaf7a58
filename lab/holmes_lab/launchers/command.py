"""The command line by which a launcher starts a job on all nodes of a lab.

    holmes lab run --launcher srun -- python train.py       ->   srun --nodes 4 --ntasks-per-node
                                                                 2 python train.py
    holmes lab run --launcher srun -- sbatch --wait job.sh  ->   as it stands

A command that begins with a launcher's own program is run as it stands: on the login host, torchrun on every
node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_lab.lab import Lab
from holmes_lab.launchers.daemons import Daemons
from holmes_lab.network.shaping import LOGIN
from holmes_lab.process import ranks
from holmes_lab.process.job import Job
from holmes_lab.rights import PACKAGES, program

#: Launcher -> the daemons that it needs.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "torchrun": (),
    "srun": ("slurm",),
    "mpirun": ("ssh",),
    "deepspeed": ("ssh",),
}
#: Launcher -> what a command begins with that already starts the job.
_OWN = {
    "torchrun": ("torchrun",),
    "srun": ("srun", "sbatch", "salloc", "scontrol", "sinfo", "squeue", "scancel"),
    "mpirun": ("mpirun", "mpiexec", "ssh", "pdsh"),
    "deepspeed": ("deepspeed", "ds", "dsr", "ssh", "pdsh"),
}
_STORE_PORT, _RENDEZVOUS_PORT = 29500, 29400


def started(
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

    torchrun is started on every node. The other launchers are started once, on the lab's login host, from
    which they start the processes on the nodes.

    Args:
        lab: The emulated nodes and networks, with a login host.
        order: Names of the nodes to use, in this order; None for all nodes of the lab.
        processes: Processes on each node; None for the number that the lab's cluster file names.
        accelerator: Settings of the emulated accelerator; None without one.
        options: Passed to Lab.start_programs.

    Returns:
        The running job, whose "ranks" are the launcher's programs, and the host of each of them.
    """
    if order is None:
        nodes = list(lab.nodes)
    else:
        nodes = [node for node in lab.nodes if node.name in order]
        nodes.sort(key=lambda node: order.index(node.name))
    count = ranks.processes_for_each(nodes, processes, lab.spec.source)
    if launcher in PACKAGES and not starts_itself(
        launcher, command
    ):  # `command` has no launcher yet
        program(launcher)  # raises a HolmesError that names the package to install
    names = [node.name for node in nodes]
    # Services that the launcher needs on the nodes: Slurm's for srun, sshd for mpirun and deepspeed.
    daemons = Daemons(lab, NEEDS[launcher], names, count, env, accelerator)
    argv = command_line(launcher, names, count, command, daemons.directory)
    hosts = names if launcher == "torchrun" else [LOGIN]
    programs = [daemons.program(argv, host) for host in hosts]  # each runs the launcher on one host
    return lab.start_programs(programs, **options), hosts


def starts_itself(launcher: str, command: Sequence[str]) -> bool:
    """Whether the command begins with the launcher's own program."""
    words = [Path(word).name for word in command]
    if words[0].startswith("python") and words[1:2] == ["-m"]:
        module = {
            "torch.distributed.run": "torchrun",
            "deepspeed.launcher.runner": "deepspeed",
        }.get(words[2:3][0], "")
        return module in _OWN[launcher]
    return words[0] in _OWN[launcher]


def command_line(
    launcher: str, nodes: Sequence[str], count: int, command: Sequence[str], directory: Path
) -> list[str]:
    """`command` as a job of `count` processes on each of `nodes`, in that order; files that the launcher
    reads (a hostfile) are written into `directory`. HolmesError where the launcher cannot start it."""
    if starts_itself(launcher, command):
        return list(command)
    if launcher == "torchrun":
        sizes = [
            f"--nnodes={len(nodes)}",
            f"--nproc-per-node={count}",
            "--rdzv-backend=c10d",
            "--rdzv-id=lab",
        ]
        return [
            *_module(command, "torchrun", "torch.distributed.run"),
            *sizes,
            f"--rdzv-endpoint={nodes[0]}:{_RENDEZVOUS_PORT}",
            "--no-python",
            *command,
        ]
    if launcher == "srun":
        return [
            "srun",
            f"--nodes={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            f"--ntasks-per-node={count}",
            f"--gpus-per-node={count}",
            "--kill-on-bad-exit=1",
            *command,
        ]
    hosts = directory / "hostfile"
    hosts.write_text("".join(f"{name} slots={count}\n" for name in nodes))
    if launcher == "mpirun":
        exports = [
            text
            for said in (f"MASTER_ADDR={nodes[0]}", f"MASTER_PORT={_STORE_PORT}", "PATH")
            for text in ("-x", said)
        ]
        return [
            "mpirun",
            "--allow-run-as-root",
            "--hostfile",
            str(hosts),
            "-np",
            str(len(nodes) * count),
            "--bind-to",
            "none",
            *exports,
            *command,
        ]
    if (
        len(command) < 2
        or not Path(command[0]).name.startswith("python")
        or command[1].startswith("-")
    ):
        raise HolmesError(
            f"--launcher deepspeed: the command must be `python SCRIPT ...`, not"
            f" {' '.join(command[:2])!r:.80}: deepspeed starts scripts"
        )
    return [
        *_module(command, "deepspeed", "deepspeed.launcher.runner"),
        "--hostfile",
        str(hosts),
        "--force_multi",
        *command[1:],
    ]


def _module(command: Sequence[str], name: str, module: str) -> list[str]:
    """The launcher of the Python that the command uses, where it names one."""
    return [command[0], "-m", module] if Path(command[0]).name.startswith("python") else [name]
