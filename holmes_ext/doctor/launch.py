"""Reads which nodes and how many processes the launcher of a training command starts.

    torchrun --nnodes 4 --nproc-per-node 8            deepspeed --hostfile hosts --include "a@b:0,1"
    mpirun -np 16 -H a:8,b:8 -x HOLMES=1              srun --nodes 4 --ntasks-per-node 8
    accelerate launch --num_machines 2 --num_processes 16 (or its config file)

A command may have two of them: `srun --nodes 4 torchrun --nnodes 4 ...` starts torchrun once on each node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holmes_ext.cluster.sources.hostfile import read_hostfile
from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.doctor.deepspeed_hosts import ResourceError, active_hosts
from holmes_ext.errors import HolmesError

#: Name of an option without its dashes, with "-" for "_" -> its values, in their order.
Options = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class LaunchedNodes:
    """Nodes and processes that one launcher starts. A number of 0 is unknown."""

    launcher: str
    nodes: int = 0
    node_flag: str = ""  # option that says the number of nodes, for messages
    hosts: dict[str, int] = field(default_factory=dict)  # host -> processes on it; {} if not named
    host_flag: str = ""  # option that names the hosts
    processes: int = 0  # on each node
    process_flag: str = ""
    world_size: int = 0  # processes on all nodes
    world_flag: str = ""
    error: str = ""  # why the launcher would not start the job as it is meant, "" if it would


def read_launches(words: Sequence[str], environ: Mapping[str, str]) -> list[LaunchedNodes]:
    """Return what the launchers of a command start, the outermost first.

    Args:
        words: The command up to the script, which holds the launchers and their options.
        environ: Environment variables of the command.
    """
    starts: list[tuple[int, str]] = []  # position of a launcher's last word, its name
    for position, word in enumerate(words):
        program = word.rpartition("/")[2]
        name = _LAUNCHER_OF_WORD.get(program, "")
        if program == "accelerate" and words[position + 1 : position + 2] != ["launch"]:
            continue  # "accelerate config", for example
        if name:
            starts.append((position, name))
    if not starts:  # a wrapper with options like those of torchrun
        options = _options(words)
        return [_read_torchrun(options, {})] if "nnodes" in options else []
    ends = [position for position, _ in starts[1:]] + [len(words)]
    launches = []
    for (position, name), end in zip(starts, ends):
        options = _options(words[position + 1 : end])
        try:
            launches.append(replace(_READERS[name](options, environ), launcher=name))
        except HolmesError as error:
            launches.append(LaunchedNodes(name, error=str(error)))
    return launches


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


_ASSIGNMENT = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)")
#: Options whose number may follow without a space: "-N4", "-n32".
_JOINED = re.compile(r"-([NnHwc])([0-9].*)")


def _options(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the options among some words: name -> its values, in their order.

    The value is in the same word (--nnodes=2, -N2) or in the next one. An option without a value gets the
    next word as its value, too: which options have one differs between launchers.
    """
    options: dict[str, list[str]] = {}
    for word, next_word in zip(words, [*words[1:], ""]):
        joined = _JOINED.fullmatch(word)
        if joined:
            options.setdefault(joined[1], []).append(joined[2])
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            key = name.lstrip("-").replace("_", "-")
            options.setdefault(key, []).append(value if equals else next_word)
    return options


@dataclass(frozen=True)
class _Number:
    """Number that an option gives, and the option as the user wrote it."""

    value: int = 0  # 0 if no option gives a number
    flag: str = ""


def _number(options: Options, *names: str) -> _Number:
    """Return the number in the last of some options that mean the same.

    Args:
        options: The options of a launcher.
        names: Their names without dashes.
    """
    for name in names:
        value = options.get(name, [""])[-1]
        if value.isdecimal():
            dashes = "--" if len(name) > 1 and name not in _SINGLE_DASH else "-"
            return _Number(int(value), f"{dashes}{name}")
    return _Number()


_SINGLE_DASH = ("np", "npernode", "ppn", "perhost")


def _read_torchrun(options: Options, environ: Mapping[str, str]) -> LaunchedNodes:
    """Return what torchrun starts.

    Args:
        options: Its options.
        environ: Environment variables. PET_NNODES and PET_NPROC_PER_NODE are defaults of its options.
    """
    nodes_text = options.get("nnodes", [environ.get("PET_NNODES", "")])[-1]
    fewest, colon, most = nodes_text.partition(":")
    if colon and fewest != most:  # elastic: the number is not known before the job starts
        fewest = ""
    nodes = int(fewest) if fewest.isdecimal() else 0
    processes = _number(options, "nproc-per-node")
    if not processes.value and environ.get("PET_NPROC_PER_NODE", "").isdecimal():
        processes = _Number(int(environ["PET_NPROC_PER_NODE"]), "PET_NPROC_PER_NODE")
    return LaunchedNodes(
        launcher="torchrun",
        nodes=1 if not nodes_text and "nnodes" not in options else nodes,
        node_flag="--nnodes",
        processes=processes.value,
        process_flag=processes.flag,
    )


#: Where the deepspeed launcher looks for hosts.
_DEFAULT_HOSTFILE = "/job/hostfile"


def _read_deepspeed(options: Options, environ: Mapping[str, str]) -> LaunchedNodes:
    """Return what the deepspeed launcher starts.

    Args:
        options: Its options.
        environ: Environment variables; not used.

    Raises:
        HolmesError: The hostfile cannot be read.
    """
    path = options.get("hostfile", options.get("H", [_DEFAULT_HOSTFILE]))[-1] or _DEFAULT_HOSTFILE
    include = options.get("include", options.get("i", [""]))[-1]
    node_limit = _number(options, "num-nodes")
    processes = _number(options, "num-gpus", "num-accelerators")
    if not Path(path).is_file():
        if include and not processes.value:  # "localhost:0,1,2"
            processes = _Number(include.count(",") + 1, "--include")
        error = ""
        if path != _DEFAULT_HOSTFILE:
            error = f"there is no hostfile {path}, so deepspeed would train on this node only"
        elif node_limit.value > 1:
            error = "--num_nodes is above 1, and there is no hostfile (--hostfile, /job/hostfile)"
        return LaunchedNodes(
            "deepspeed",
            nodes=1,
            node_flag="deepspeed without a hostfile",
            processes=processes.value,
            process_flag=processes.flag.replace("-gpus", "_gpus"),
            error=error,
        )
    try:
        hosts = active_hosts(
            path,
            include=include,
            exclude=options.get("exclude", options.get("e", [""]))[-1],
            node_limit=node_limit.value,
            processes=processes.value,
        )
    except ResourceError as error:
        return LaunchedNodes("deepspeed", error=f"deepspeed ends with an error: {error}")
    return LaunchedNodes(
        "deepspeed",
        nodes=len(hosts),
        node_flag=f"hostfile {path}",
        hosts=hosts,
        host_flag=f"hostfile {path}",
    )


#: Options that only Open MPI's mpirun has.
_OPEN_MPI = ("x", "mca", "bind-to", "map-by", "allow-run-as-root", "npernode")


def _read_mpirun(options: Options, environ: Mapping[str, str]) -> LaunchedNodes:
    """Return what mpirun starts.

    Args:
        options: Its options, those of Open MPI, MPICH or Intel MPI.
        environ: Environment variables; not used.

    Raises:
        HolmesError: The hostfile cannot be read.
    """
    total = _number(options, "np", "n", "c")
    per_node = _number(options, "npernode", "N", "ppn", "perhost")
    for value in options.get("map-by", []):
        pieces = value.split(":")
        if pieces[0] == "ppr" and pieces[2:3] == ["node"] and pieces[1].isdecimal():
            per_node = _Number(int(pieces[1]), f"--map-by {value}")
    slots: dict[str, int] = {}
    host_flag = ""
    for name in ("H", "host", "hosts"):
        for value in options.get(name, []):
            host_flag = f"-{name}" if name == "H" else f"--{name}"
            _add_slots(slots, value)
    for name in ("hostfile", "machinefile", "default-hostfile", "f"):
        for value in options.get(name, []):
            host_flag = f"hostfile {value}"
            slots.update({node.name: node.processes for node in read_hostfile(value)})
    launch = LaunchedNodes(
        "mpirun",
        processes=per_node.value,
        process_flag=per_node.flag,
        world_size=total.value,
        world_flag=total.flag,
    )
    if not slots:
        return launch
    slot_count = sum(slots.values())
    is_open_mpi = any(name in options for name in _OPEN_MPI)
    error = ""
    if is_open_mpi and total.value > slot_count and "oversubscribe" not in options:
        error = (
            f"{total.flag} is {total.value}, but {host_flag} has {slot_count} slots: mpirun ends with "
            '"not enough slots"'
        )
    hosts = _filled(slots, total.value, per_node.value)
    return replace(
        launch,
        nodes=len(hosts),
        node_flag=host_flag,
        hosts=hosts,
        host_flag=host_flag,
        world_size=0,
        error=error,
    )


def _add_slots(slots: dict[str, int], hosts: str) -> None:
    """Add the hosts of mpirun's -H to a table of slots: "a:8,b:8", or "a,a,b" with one slot each time."""
    for item in hosts.split(","):
        host, _, count = item.strip().partition(":")
        if host:
            slots[host] = slots.get(host, 0) + (int(count) if count.isdecimal() else 1)


def _filled(slots: Mapping[str, int], total: int, per_node: int) -> dict[str, int]:
    """Return how many processes mpirun starts on each host.

    Args:
        slots: Host -> its slots.
        total: Number of processes, 0 for one in each slot.
        per_node: Largest number of processes on a host, 0 if only the slots limit it.
    """
    left = total or (len(slots) * per_node if per_node else sum(slots.values()))
    if per_node:
        limits = dict.fromkeys(slots, per_node)
    elif left > sum(slots.values()):  # oversubscribed: the same share on each host
        limits = dict.fromkeys(slots, -(-left // len(slots)))
    else:
        limits = dict(slots)
    hosts = {}
    for host, limit in limits.items():
        count = min(limit, left)
        left -= count
        if count:
            hosts[host] = count
    return hosts


def _read_srun(options: Options, environ: Mapping[str, str]) -> LaunchedNodes:
    """Return what srun starts.

    Args:
        options: Its options.
        environ: Environment variables; not used.

    Raises:
        HolmesError: --nodelist is no list of hosts.
    """
    nodes_text = options.get("nodes", options.get("N", [""]))[-1]
    fewest, dash, most = nodes_text.partition("-")
    nodes = int(fewest) if fewest.isdecimal() and (not dash or fewest == most) else 0
    tasks = _number(options, "ntasks", "n")
    per_node = _number(options, "ntasks-per-node")
    names: list[str] = []
    for value in options.get("nodelist", options.get("w", [])):
        if "/" not in value:  # else it is a file
            names = expand(value, "srun --nodelist")
    node_flag = "--nodes"
    if not nodes and tasks.value and per_node.value:
        nodes = -(-tasks.value // per_node.value)
        node_flag = "--ntasks"
    if len(names) != nodes:  # more hosts may be added, or their number is not given
        names = names if not nodes else []
    processes = per_node.value
    process_flag = per_node.flag
    if not processes and tasks.value and nodes and tasks.value % nodes == 0:
        processes = tasks.value // nodes
        process_flag = tasks.flag
    return LaunchedNodes(
        "srun",
        nodes=nodes or len(names),
        node_flag=node_flag if nodes else "--nodelist",
        hosts=dict.fromkeys(names, processes),
        host_flag="--nodelist",
        processes=processes,
        process_flag=process_flag,
        world_size=0 if nodes and processes else tasks.value,
        world_flag=tasks.flag,
    )


_CONFIG_LINE = re.compile(r"""\s*["']?(\w+)["']?\s*:\s*["']?([^"',#]*)["']?,?\s*(?:#.*)?""")


def _read_accelerate(options: Options, environ: Mapping[str, str]) -> LaunchedNodes:
    """Return what `accelerate launch` starts.

    Args:
        options: Its options, which go before its configuration file.
        environ: Environment variables, which name the folder of the default configuration file.

    Raises:
        HolmesError: A hostfile cannot be read.
    """
    path = options.get("config-file", [""])[-1]
    if path and not Path(path).is_file():
        return LaunchedNodes("accelerate", error=f"there is no --config_file {path}")
    config = _accelerate_config(path, environ)

    def value_of(name: str) -> str:
        return options.get(name.replace("_", "-"), [config.get(name, "")])[-1]

    nodes_text = value_of("num_machines")
    world_text = value_of("num_processes")
    nodes = int(nodes_text) if nodes_text.isdecimal() else 1
    world_size = int(world_text) if world_text.isdecimal() else 0
    hostfile = value_of("deepspeed_hostfile")
    is_standard = value_of("deepspeed_multinode_launcher") == "standard"
    if hostfile and nodes > 1 and not is_standard:
        deepspeed_options = {"hostfile": [hostfile]}
        for name, key in (("include", "inclusion"), ("exclude", "exclusion")):
            if value_of(f"deepspeed_{key}_filter"):
                deepspeed_options[name] = [value_of(f"deepspeed_{key}_filter")]
        if world_size and len(deepspeed_options) == 1:
            deepspeed_options["num-gpus"] = [str(world_size // nodes)]
        return _read_deepspeed(deepspeed_options, environ)
    error = ""
    if world_size % nodes:
        error = (
            f"--num_processes is {world_size}, which is not a multiple of --num_machines {nodes}: accelerate "
            f"starts {world_size // nodes} on each, and the rest is missing"
        )
    return LaunchedNodes(
        "accelerate",
        nodes=nodes,
        node_flag="--num_machines",
        processes=world_size // nodes,
        process_flag="--num_processes",
        error=error,
    )


def _accelerate_config(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of accelerate's configuration file: key -> text, also of nested keys.

    Args:
        path: Path of the file, YAML or JSON; "" for the default one.
        environ: Environment variables.
    """
    if not path:
        cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
        home = environ.get("HF_HOME") or f"{cache}/huggingface"
        path = f"{home}/accelerate/default_config.yaml"
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    matches = [_CONFIG_LINE.fullmatch(line) for line in lines]
    return {match[1]: match[2].strip() for match in matches if match and match[2].strip()}


_READERS: dict[str, Callable[[Options, Mapping[str, str]], LaunchedNodes]] = {
    "torchrun": _read_torchrun,
    "deepspeed": _read_deepspeed,
    "mpirun": _read_mpirun,
    "srun": _read_srun,
    "accelerate": _read_accelerate,
}
#: Word of a command -> the launcher that it starts.
_LAUNCHER_OF_WORD = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), "deepspeed"),
    **dict.fromkeys(
        ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "horovodrun"), "mpirun"
    ),
    "srun": "srun",
    **dict.fromkeys(
        ("accelerate", "accelerate-launch", "accelerate.commands.launch"), "accelerate"
    ),
}
