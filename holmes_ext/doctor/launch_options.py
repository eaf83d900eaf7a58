"""Finds the launchers in a training command, their options, and the variables that it sets.

    srun --nodes 4 torchrun --nnodes=4 --nproc-per-node 8 train.py      srun: --nodes 4
                                                                        torchrun: --nnodes=4, ...

The names of options are compared without their dashes, and with "-" for "_".
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: Numbers with more digits count as not given.
MAX_DIGITS = 6
_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)")
#: Options whose number may follow without a space: "-N4", "-n32".
_JOINED = re.compile(r"-([NnHwc])([0-9].*)")


@dataclass(frozen=True)
class OptionNames:
    """Names of a launcher's options that give nodes and processes. Several names mean the same."""

    nodes: tuple[str, ...] = ()  # number of nodes
    processes: tuple[str, ...] = ()  # number of processes on each node
    total: tuple[str, ...] = ()  # number of processes on all nodes
    hosts: tuple[str, ...] = ()  # list of the nodes' names

    def meaning_of(self, name: str) -> str:
        """Return the field of this class that has an option's name, "" if none has it."""
        for meaning in ("nodes", "processes", "total", "hosts"):
            if name in getattr(self, meaning):
                return meaning
        return ""


SRUN = OptionNames(
    nodes=("nodes", "N"),
    processes=("ntasks-per-node",),
    total=("ntasks", "n"),
    hosts=("nodelist", "w"),
)
TORCHRUN = OptionNames(nodes=("nnodes",), processes=("nproc-per-node",))
DEEPSPEED = OptionNames(nodes=("num-nodes",), processes=("num-gpus", "num-accelerators"))
ACCELERATE = OptionNames(nodes=("num-machines",), total=("num-processes",))
MPIRUN = OptionNames(
    processes=("npernode", "N", "ppn", "perhost"),
    total=("np", "n", "c"),
    hosts=("H", "host", "hosts"),
)
#: Launcher -> the names of its options.
NAMES_OF_LAUNCHER = {
    "srun": SRUN,
    "sbatch": SRUN,
    "salloc": SRUN,
    "torchrun": TORCHRUN,
    "tune": TORCHRUN,  # the console command of torchtune starts torchrun
    "deepspeed": DEEPSPEED,
    "accelerate": ACCELERATE,
    "mpirun": MPIRUN,
    "aprun": MPIRUN,
}
#: Word of a command -> the launcher that it starts.
_LAUNCHER_OF_WORD = {
    **{name: name for name in NAMES_OF_LAUNCHER},
    **dict.fromkeys(("torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    "deepspeed.launcher.runner": "deepspeed",
    **dict.fromkeys(("mpiexec", "mpiexec.hydra", "orterun", "prterun", "horovodrun"), "mpirun"),
    **dict.fromkeys(("accelerate-launch", "accelerate.commands.launch"), "accelerate"),
}


class WrittenOption(NamedTuple):
    """An option with its value, as a command has it."""

    name: str = ""  # without dashes, with "-" for "_"
    value: str = ""
    text: str = ""  # both, as in the command: "--nnodes 4", "--nnodes=4" or "-N4"


class LauncherWords(NamedTuple):
    """A launcher of a command, and the words after it up to the next launcher."""

    launcher: str  # a key of NAMES_OF_LAUNCHER
    words: tuple[str, ...]


def find_launchers(words: Sequence[str], launchers: Container[str]) -> list[LauncherWords]:
    """Return the launchers of a command, the outermost first.

    Args:
        words: The command up to the script.
        launchers: Keys of NAMES_OF_LAUNCHER. Other launchers are skipped.
    """
    starts: list[tuple[int, str]] = []  # position of a launcher's word, its name
    for position, word in enumerate(words):
        program = word.rpartition("/")[2]
        launcher = _LAUNCHER_OF_WORD.get(program, "")
        if program == "accelerate" and list(words[position + 1 : position + 2]) != ["launch"]:
            continue  # "accelerate config", for example
        if launcher and launcher in launchers:
            starts.append((position, launcher))
    ends = [position for position, _ in starts[1:]] + [len(words)]
    return [
        LauncherWords(launcher, tuple(words[position + 1 : end]))
        for (position, launcher), end in zip(starts, ends)
    ]


def written_options(words: Sequence[str]) -> list[WrittenOption]:
    """Return the options among some words, in their order.

    The value is in the same word (--nnodes=2, -N2) or in the next one. An option without a value gets the
    next word as its value, too: which options have one differs between launchers.
    """
    found = []
    for word, next_word in zip(words, [*words[1:], ""]):
        joined = _JOINED.fullmatch(word)
        if joined:
            found.append(WrittenOption(joined[1], value=joined[2], text=word))
        elif word.startswith("-"):
            option, equals, value = word.partition("=")
            name = option.lstrip("-").replace("_", "-")
            if equals:
                found.append(WrittenOption(name, value, text=word))
            else:
                found.append(WrittenOption(name, value=next_word, text=f"{word} {next_word}"))
    return found


def by_name(written: Iterable[WrittenOption]) -> dict[str, list[str]]:
    """Return the values of options: name -> values, in their order."""
    values: dict[str, list[str]] = {}
    for option in written:
        values.setdefault(option.name, []).append(option.value)
    return values


def number_in(text: str) -> int:
    """Return the number in an option's value, 0 if it is none. A range such as 4:4 or 4-4 is the number 4."""
    fewest, _, most = text.replace("-", ":").partition(":")
    is_number = fewest.isdecimal() and len(fewest) <= MAX_DIGITS and most in ("", fewest)
    return int(fewest) if is_number else 0


def exported_variables(words: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that a command sets for its ranks.

    They are those of `env NAME=VALUE`, `mpirun -x NAME=VALUE`, `mpiexec -genv NAME VALUE` and
    `srun --export=ALL,NAME=VALUE`.

    Args:
        words: The command up to the script.
    """
    variables = {}
    for position, word in enumerate(words):
        match = _ASSIGNMENT.fullmatch(word)
        previous = words[position - 1] if position else "env"
        is_after_env = previous == "env" or _ASSIGNMENT.fullmatch(previous) is not None
        if match and (is_after_env or previous == "-x"):
            variables[match[1]] = match[2]
        elif word in ("-genv", "-env") and position + 2 < len(words):
            variables[words[position + 1]] = words[position + 2]
        elif word.startswith("--export="):
            for item in word.removeprefix("--export=").split(","):
                exported = _ASSIGNMENT.fullmatch(item)
                if exported:
                    variables[exported[1]] = exported[2]
    return variables
