"""Reads from a launcher's options how many nodes and processes it starts, and on which hosts.

    srun --nodes 4 torchrun --nnodes 4 --nproc-per-node 8 train.py      4 nodes, 8 processes on each
    mpirun -np 16 -H a1:8,a2:8 python train.py                          the hosts a1 and a2

If several launchers are in a command, each number is that of the last launcher that gives it: srun starts
one torchrun on each node, which starts the processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.doctor.command_words import Command
from holmes_ext.errors import HolmesError

_SLURM = {
    "-N": "nodes",
    "--nodes": "nodes",
    "-n": "total",
    "--ntasks": "total",
    "--ntasks-per-node": "processes",
    "-w": "hosts",
    "--nodelist": "hosts",
}
_TORCHRUN = {"--nnodes": "nodes", "--nproc-per-node": "processes"}
_DEEPSPEED = {"--num-nodes": "nodes", "--num-gpus": "processes"}
_ACCELERATE = {"--num-machines": "nodes", "--num-processes": "total"}
_MPIRUN = {
    "-np": "total",
    "--np": "total",
    "-n": "total",
    "-N": "processes",
    "-npernode": "processes",
    "--npernode": "processes",
    "-ppn": "processes",
    "-H": "hosts",
    "-host": "hosts",
    "--host": "hosts",
    "-hosts": "hosts",
}
#: Launcher, as program or module -> its option -> what the option's value is.
OPTIONS = {
    "srun": _SLURM,
    "sbatch": _SLURM,
    "salloc": _SLURM,
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "tune": _TORCHRUN,
    "deepspeed": _DEEPSPEED,
    "deepspeed.launcher.runner": _DEEPSPEED,
    "accelerate": _ACCELERATE,
    "accelerate.commands.launch": _ACCELERATE,
    "mpirun": _MPIRUN,
    "mpiexec": _MPIRUN,
    "orterun": _MPIRUN,
    "horovodrun": _MPIRUN,
    "aprun": _MPIRUN,
}
#: Variables that a command may set for its launcher (NNODES=2 megatron sft ...), for ms-swift and others.
VARIABLES = {"NNODES": "nodes", "NPROC_PER_NODE": "processes"}
#: Numbers with more digits count as not given.
MAX_DIGITS = 6


@dataclass(frozen=True)
class Launched:
    """Nodes and processes that a command starts, as far as its launchers' options say."""

    nodes: int = 0  # 0: not given
    processes: int = 0  # on each node; 0: not given
    hosts: tuple[str, ...] = ()  # names of the nodes; () if they are not given
    nodes_option: str = ""  # that gives `nodes`, with its value: "--nnodes 4"
    processes_option: str = ""  # that gives `processes`


def count_launched(command: Command) -> Launched:
    """Return the nodes and processes that the launchers of a command start.

    A value that is no number, such as $SLURM_NNODES or 2:4, counts as not given, but its option is kept.
    """
    words = command.launcher
    if command.hidden_model:
        words = command.words  # a console command is its own launcher: tune run --nnodes 2
    result = Launched()
    for values in _options_of_launchers(words):
        result = _started_by(values, result)
    # The scheduler may have more hosts than the launcher inside uses.
    return result if len(result.hosts) == result.nodes else replace(result, hosts=())


def _started_by(values: dict[str, _Option], outer: Launched) -> Launched:
    """Return what a launcher starts.

    Args:
        values: "nodes", "processes", "total" or "hosts" -> the launcher's option.
        outer: What the launchers around it start: each of their processes is a launcher of this kind.
    """
    nodes = values.get("nodes", _Option())
    processes = values.get("processes", _Option())
    total = values.get("total", _Option())
    hosts = _hosts(values["hosts"].value) if "hosts" in values else outer.hosts
    result = Launched(outer.nodes, hosts=hosts, nodes_option=outer.nodes_option)
    if nodes.text:
        result = replace(result, nodes=nodes.number, nodes_option=nodes.text)
    elif "hosts" in values and hosts:
        result = replace(result, nodes=len(hosts), nodes_option=values["hosts"].text)
    elif total.number and processes.number:
        count = total.number // processes.number
        result = replace(result, nodes=count, nodes_option=f"{total.text} {processes.text}")
    if processes.text:
        return replace(result, processes=processes.number, processes_option=processes.text)
    if total.number and result.nodes and total.number % result.nodes == 0:
        count = total.number // result.nodes
        return replace(result, processes=count, processes_option=total.text)
    return result


@dataclass(frozen=True)
class _Option:
    """An option of a launcher with its value."""

    text: str = ""  # as it stands in the command: "--nnodes 4" or "NNODES=4"; "" if there is none
    value: str = ""

    @property
    def number(self) -> int:
        """The value as a number; 0 if it is none. A range such as 4:4 or 4-4 is the number 4."""
        least, _, most = self.value.replace("-", ":").partition(":")
        is_number = least.isdecimal() and len(least) <= MAX_DIGITS and most in ("", least)
        return int(least) if is_number else 0


def _options_of_launchers(words: Sequence[str]) -> list[dict[str, _Option]]:
    """Return the options of each launcher in a command that give nodes or processes, outermost first.

    An option is under its meaning: "nodes", "processes", "total" or "hosts".
    """
    found: list[dict[str, _Option]] = [{}]  # the first for variables before a launcher
    meaning_of_option: dict[str, str] = {}
    following = [*words[1:], ""]
    for word, next_word in zip(words, following):
        program = PurePosixPath(word).name
        if program in OPTIONS:
            meaning_of_option = OPTIONS[program]
            found.append({})
            continue
        name, equals, value = word.partition("=")
        if name in VARIABLES and equals:
            found[-1][VARIABLES[name]] = _Option(word, value)
        name = name.replace("_", "-") if name.startswith("--") else name
        meaning = meaning_of_option.get(name, "")
        attached = meaning_of_option.get(word[:2], "")  # such as -N4
        if meaning:
            text = word
            if not equals:
                value = next_word
                text = f"{word} {value}"
            found[-1][meaning] = _Option(text, value)
        elif attached and word[2:].isdecimal():
            found[-1][attached] = _Option(word, word[2:])
    return found


def _hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list such as a[1-2] or a1:8,a2:8; () if the text is no list of hosts."""
    try:
        items = expand(text, "hosts") if text else []
    except HolmesError:
        return ()
    names = [item.partition(":")[0] for item in items]
    if not all(name and name[0].isalnum() for name in names):
        return ()
    return tuple(dict.fromkeys(names))
