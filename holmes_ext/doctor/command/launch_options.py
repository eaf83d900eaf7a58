"""Finds the launchers in a training command, their options, and the variables that it sets.

    srun --nodes 4 torchrun --nnodes=4 --nproc-per-node 8 train.py      srun: --nodes 4
                                                                        torchrun: --nnodes=4, ...

The names of options are compared without their dashes, and with "-" for "_".
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError

#: Numbers with more digits count as not given.
MAX_DIGITS = 6
#: Variable of Slurm with the number of GPUs that a job has on the node.
GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
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
        """Return the name of the field that lists an option: "nodes" for SRUN's "N". "" if none does."""
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
    """Option of a launcher with its value, as the user wrote it in the command."""

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

    The value is in the same word (--nnodes=2, -N2) or in the next. An option without a value gets the next
    word as its value, too: launchers differ in the options that have a value.
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
    """Group the values of a launcher's options by name, in their order."""
    values: dict[str, list[str]] = {}
    for option in written:
        values.setdefault(option.name, []).append(option.value)
    return values


def number_in(text: str) -> int:
    """Parse the number in an option's value; 0 if it is none.

    A range is a number only if both ends are equal: 4:4 and 4-4 give 4, and 2:4 gives 0.
    """
    fewest, _, most = text.replace("-", ":").partition(":")
    is_number = fewest.isdecimal() and len(fewest) <= MAX_DIGITS and most in ("", fewest)
    return int(fewest) if is_number else 0


#: Option of sbatch -> its long name. Only these options say something about nodes and processes.
_ALLOCATION_OPTIONS = {
    **{name: name for name in ("nodes", "ntasks", "ntasks-per-node", "nodelist")},
    **{name: name for name in ("gres", "gpus", "gpus-per-node", "gpus-per-task")},
    **{"N": "nodes", "n": "ntasks", "w": "nodelist", "G": "gpus"},
}
_HET_JOB = ("hetjob", "packjob")
#: GPUs in an item of --gres: "gpu:8", "gpu:a100:8(S:0-1)".
_GRES_GPUS = re.compile(r"gpu(?::[A-Za-z][^:,()]*)?(?::(\d+))?(?:\(.*)?")
#: Number in a value of --gpus-per-node (GPUs of each node) or --gpus (of all nodes): "a100:8", "8".
_GPU_COUNT = re.compile(r"(?:[A-Za-z][^:,]*:)?(\d+)")


def allocation_options(words: Sequence[str]) -> list[str]:
    """Return the options of sbatch that concern nodes and processes, as --name=value.

    A heterogeneous job (#SBATCH hetjob) has components, each with its own options. Only options with the
    same value in all components are returned, without numbers and names of nodes: `srun --het-group`
    decides later which components a step uses.

    Args:
        words: Options of a script's #SBATCH lines.
    """
    components: list[dict[str, str]] = [{}]
    for word, next_word in zip(words, [*words[1:], ""]):
        if word in _HET_JOB:
            components.append({})
        # The option of this word: its value may be in the next word.
        for option in written_options([word, next_word])[:1] if word.startswith("-") else []:
            name = _ALLOCATION_OPTIONS.get(option.name, "")
            if name:
                components[-1][name] = option.value
    shared = dict(components[0])
    for component in components[1:]:
        shared = {name: value for name, value in shared.items() if component.get(name) == value}
    if len(components) > 1:
        for name in ("nodes", "ntasks", "gpus", "nodelist"):
            shared.pop(name, None)
    return [f"--{name}={value}" for name, value in shared.items()]


def allocation_variables(words: Sequence[str]) -> dict[str, str]:
    """Return the SLURM_... variables that a command has inside of `sbatch OPTIONS` or `salloc OPTIONS`.

    Args:
        words: The words of a command before the script that sbatch or salloc starts.
    """
    launchers = find_launchers(words, ("sbatch", "salloc"))
    if not launchers:
        return {}
    values = _allocation_values(launchers[0].words)
    variables: dict[str, str] = {}
    nodes = number_in(values.get("nodes", ""))
    if nodes:
        variables |= {"SLURM_NNODES": str(nodes), "SLURM_JOB_NUM_NODES": str(nodes)}
    per_node = number_in(values.get("ntasks-per-node", ""))
    if per_node:
        variables["SLURM_NTASKS_PER_NODE"] = str(per_node)
    tasks = number_in(values.get("ntasks", "")) or nodes * per_node
    if tasks:
        variables |= {"SLURM_NTASKS": str(tasks), "SLURM_NPROCS": str(tasks)}
    gpus = _requested_gpus(values)
    if gpus:
        variables[GPUS_ON_NODE] = str(gpus)
    if "gpus-per-node" in values:
        variables["SLURM_GPUS_PER_NODE"] = values["gpus-per-node"]
    if values.get("nodelist") and "/" not in values["nodelist"]:
        variables["SLURM_JOB_NODELIST"] = values["nodelist"]
    return variables


def gpus_on_node(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Return how many GPUs Slurm gives a command on each node, 0 if that is not known.

    Args:
        words: The command up to the script. If several of its launchers (srun, sbatch, salloc) request
            GPUs, the last of them counts.
        environ: Environment variables. Inside of an allocation, they have the number.
    """
    for launcher in reversed(find_launchers(words, ("srun", "sbatch", "salloc"))):
        gpus = _requested_gpus(_allocation_values(launcher.words))
        if gpus:
            return gpus
    return number_in(environ.get(GPUS_ON_NODE, ""))


def _allocation_values(words: Sequence[str]) -> dict[str, str]:
    """Return the last values of options of srun or sbatch: long name -> value."""
    options = by_name(written_options(words))
    return {
        long_name: options[name][-1]
        for name, long_name in _ALLOCATION_OPTIONS.items()
        if name in options
    }


def _requested_gpus(options: Mapping[str, str]) -> int:
    """Return the number of GPUs on each node that options of sbatch request, 0 if they do not say it.

    Args:
        options: Long name of an option -> its value.
    """
    match = _GPU_COUNT.fullmatch(options.get("gpus-per-node", ""))
    if match:
        return number_in(match[1])
    for item in options.get("gres", "").removeprefix("gres/").split(","):
        match = _GRES_GPUS.fullmatch(item)
        if match:
            return number_in(match[1] or "1")
    nodes = number_in(options.get("nodes", ""))
    match = _GPU_COUNT.fullmatch(options.get("gpus", ""))
    total = number_in(match[1]) if match else 0
    if nodes and total % nodes == 0:
        return total // nodes
    return 0


#: Option of srun -> its short form, and the variable with its default inside of an allocation.
_DEFAULTS_OF_SRUN = {
    "nodes": ("N", "SLURM_NNODES"),
    "ntasks": ("n", "SLURM_NTASKS"),
    "ntasks-per-node": ("", "SLURM_NTASKS_PER_NODE"),
}


def with_allocation(
    options: Mapping[str, Sequence[str]], environ: Mapping[str, str]
) -> Mapping[str, Sequence[str]]:
    """Return srun's options, with those of the surrounding allocation where srun has none of its own.

    SLURM_... variables have the allocation's numbers of nodes and tasks. They are not used here:

        inside of a step (SLURM_STEP_ID)            the variables are those of the step
        with --het-group                            srun uses only a part of the allocation
        for nodes, with --nodelist                  the list gives the nodes
        for tasks, with --ntasks[-per-node]         the option replaces all numbers of tasks

    Args:
        options: Options of srun.
        environ: Environment variables.
    """
    if "SLURM_STEP_ID" in environ or "het-group" in options:
        return options
    names_hosts = not {"nodelist", "w"}.isdisjoint(options)
    has_tasks = not {"ntasks", "n", "ntasks-per-node"}.isdisjoint(options)
    merged: dict[str, Sequence[str]] = dict(options)
    for name, (short, variable) in _DEFAULTS_OF_SRUN.items():
        may_apply = not names_hosts if name == "nodes" else not has_tasks
        if may_apply and name not in options and short not in options and variable in environ:
            merged[name] = [environ[variable]]
    return merged


#: Options of launchers that name a file with hosts.
_FILE_OPTIONS = ("hostfile", "machinefile", "default-hostfile", "rankfile", "rf", "config-file")


def has_missing_file(options: Mapping[str, Sequence[str]]) -> bool:
    """Return whether an option names a file with hosts that does not exist."""
    paths = [value for name in _FILE_OPTIONS for value in options.get(name, [])]
    return any(path and not Path(path).is_file() for path in paths)


_CONFIG_LINE = re.compile(r"""\s*["']?(\w+)["']?\s*:\s*["']?([^"',#]*)["']?,?\s*(?:#.*)?""")


def accelerate_config(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of accelerate's configuration file: key -> text, also of nested keys.

    Args:
        path: Path of the file, YAML or JSON; "" for the default file.
        environ: Environment variables.
    """
    if not path:
        cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
        home = environ.get("HF_HOME") or f"{cache}/huggingface"
        path = f"{home}/accelerate/default_config.yaml"
    try:
        lines = read_text(path, advice="", errors="replace").splitlines()
    except HolmesError:
        return {}
    matches = [_CONFIG_LINE.fullmatch(line) for line in lines]
    return {match[1]: match[2].strip() for match in matches if match and match[2].strip()}


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
