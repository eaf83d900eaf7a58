"""Reads which nodes and how many processes the launcher of a training command starts.

    torchrun --nnodes 4 --nproc-per-node 8            deepspeed --hostfile hosts --include "a@b:0,1"
    mpirun -np 16 -H a:8,b:8 -x HOLMES=1              srun --nodes 4 --ntasks-per-node 8
    accelerate launch --num_machines 2 --num_processes 16 (or its config file)

A command may have two of them: `srun --nodes 4 torchrun --nnodes 4 ...` starts torchrun once on each node.
Inside of `sbatch OPTIONS`, or of an allocation of Slurm, SLURM_... variables are defaults of srun's options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holmes_ext.cluster.sources.hostfile import read_rankfile, read_slots
from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.doctor.command.command_words import SHELLS, Command
from holmes_ext.doctor.command.deepspeed_hosts import ResourceError, active_hosts
from holmes_ext.doctor.command.launch_options import (
    DEEPSPEED,
    GPUS_ON_NODE,
    MAX_DIGITS,
    MPIRUN,
    NAMES_OF_LAUNCHER,
    SRUN,
    TORCHRUN,
    LauncherWords,
    OptionNames,
    WrittenOption,
    accelerate_config,
    allocation_variables,
    by_name,
    find_launchers,
    has_missing_file,
    number_in,
    with_allocation,
    written_options,
)
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
    """Return nodes and processes that the launchers of a command start, the outermost first.

    Args:
        words: The command up to the script, with the launchers and their options.
        environ: Environment variables of the command.
    """
    environ = {**environ, **allocation_variables(words)}
    may_write_files = any(word.rpartition("/")[2] in ("sbatch", *SHELLS) for word in words)
    found = find_launchers(words, _READERS)
    if not found:  # a wrapper with options like those of torchrun
        options = by_name(written_options(words))
        return [_read_torchrun(options, {})] if "nnodes" in options else []
    launches = []
    for name, launcher_words in found:
        options = by_name(written_options(launcher_words))
        if may_write_files and has_missing_file(options):
            # The script writes the hostfile before it starts the job.
            launches.append(LaunchedNodes(name))
            continue
        try:
            launches.append(replace(_READERS[name](options, environ), launcher=name))
        except HolmesError as error:
            launches.append(LaunchedNodes(name, error=str(error)))
    return launches


@dataclass(frozen=True)
class _Number:
    """Number that an option of a launcher gives, with the option as the user wrote it."""

    value: int = 0  # 0 if no option gives a number
    flag: str = ""


def _number(options: Options, *names: str) -> _Number:
    """Read the number that an option of a launcher gives; the option may have several names.

    The first name whose last value is a number counts.

    Args:
        options: The options of a launcher.
        names: Names of the option without dashes, such as "ntasks" and "n".
    """
    for name in names:
        value = options.get(name, [""])[-1]
        if value.isdecimal() and len(value) <= MAX_DIGITS:
            dashes = "--" if len(name) > 1 and name not in _SINGLE_DASH else "-"
            return _Number(int(value), f"{dashes}{name}")
    return _Number()


_SINGLE_DASH = ("np", "npernode", "ppn", "perhost")


def _read_torchrun(options: Options, environ: Mapping[str, str]) -> LaunchedNodes:
    """Return the nodes and processes that torchrun starts.

    Args:
        environ: Environment variables. PET_NNODES and PET_NPROC_PER_NODE are defaults of its options.
    """
    nodes_text = options.get("nnodes", [environ.get("PET_NNODES", "")])[-1]
    nodes = number_in(nodes_text)  # 0 for an elastic job: the number is not known before it starts
    processes = _number(options, *TORCHRUN.processes)
    if not processes.value and environ.get("PET_NPROC_PER_NODE", "").isdecimal():
        processes = _Number(int(environ["PET_NPROC_PER_NODE"]), "PET_NPROC_PER_NODE")
    written = options.get("nproc-per-node", [""])[-1]
    if written in ("gpu", "auto"):  # one for each GPU that torch finds
        processes = _Number(number_in(environ.get(GPUS_ON_NODE, "")), f"--nproc-per-node {written}")
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
    """Return the nodes and processes that the deepspeed launcher starts.

    Args:
        environ: Environment variables; not used.

    Raises:
        HolmesError: The hostfile cannot be read.
    """
    path = options.get("hostfile", options.get("H", [_DEFAULT_HOSTFILE]))[-1] or _DEFAULT_HOSTFILE
    include = options.get("include", options.get("i", [""]))[-1]
    node_limit = _number(options, *DEEPSPEED.nodes)
    processes = _number(options, *DEEPSPEED.processes)
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
    """Return the nodes and processes that mpirun starts.

    Args:
        options: Its options, those of Open MPI, MPICH or Intel MPI.
        environ: Environment variables; not used.

    Raises:
        HolmesError: The hostfile cannot be read.
    """
    total = _number(options, *MPIRUN.total)
    per_node = _number(options, *MPIRUN.processes)
    for value in options.get("map-by", []):
        pieces = value.split(":")
        if pieces[0] == "ppr" and pieces[2:3] == ["node"] and pieces[1].isdecimal():
            per_node = _Number(int(pieces[1]), f"--map-by {value}")
    slots: dict[str, int] = {}
    host_flag = ""
    for name in MPIRUN.hosts:
        for value in options.get(name, []):
            host_flag = f"-{name}" if name == "H" else f"--{name}"
            _add_slots(slots, value)
    for name in ("hostfile", "machinefile", "default-hostfile", "f"):
        for value in options.get(name, []):
            host_flag = f"hostfile {value}"
            slots.update(read_slots(value))
    for value in _rankfiles(options):
        host_flag = f"rankfile {value}"
        slots = read_rankfile(value, list(slots))
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
    hosts = _processes_by_host(slots, total.value, per_node.value)
    return replace(
        launch,
        nodes=len(hosts),
        node_flag=host_flag,
        hosts=hosts,
        host_flag=host_flag,
        world_size=0,  # `hosts` has the number already
        error=error,
    )


def _rankfiles(options: Options) -> list[str]:
    """Return the rankfiles that mpirun's options name: -rf FILE, or --map-by rankfile:file=FILE."""
    paths = [value for name in ("rankfile", "rf") for value in options.get(name, [])]
    for value in options.get("map-by", []):
        if value.startswith("rankfile:"):
            paths += re.findall(r"file=([^,:]+)", value)
    return paths


def _add_slots(slots: dict[str, int], hosts: str) -> None:
    """Parse mpirun's -H ("a:8,b:8", or "a,a,b" with one slot each time) into a table of slots."""
    for item in hosts.split(","):
        host, _, count = item.strip().partition(":")
        if host:
            slots[host] = slots.get(host, 0) + (int(count) if count.isdecimal() else 1)


def _processes_by_host(slots: Mapping[str, int], total: int, per_node: int) -> dict[str, int]:
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
    """Return the nodes and processes that srun starts.

    Args:
        environ: Environment variables. Inside of an allocation, SLURM_... are defaults of the options.

    Raises:
        HolmesError: --nodelist is no list of hosts.
    """
    options = with_allocation(options, environ)
    nodes_text = options.get("nodes", options.get("N", [""]))[-1]
    nodes = number_in(nodes_text)
    tasks = _number(options, *SRUN.total)
    per_node = _number(options, *SRUN.processes)
    if tasks.value and nodes > tasks.value:  # srun takes no more nodes than tasks
        nodes = tasks.value
    names: list[str] = []
    for value in options.get("nodelist", options.get("w", [])):
        if "/" not in value:  # else it is a file
            names = expand(value, "srun --nodelist")
    node_flag = "--nodes"
    if not nodes and tasks.value and per_node.value:
        nodes = -(-tasks.value // per_node.value)
        node_flag = "--ntasks"  # the option that the number of nodes follows from
    # Without a number of nodes, srun starts the listed hosts. With another number, its hosts are not known.
    if len(names) != nodes:
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
        world_size=0 if nodes and processes else tasks.value,  # 0 where nodes x processes gives it
        world_flag=tasks.flag,
    )


def _read_accelerate(options: Options, environ: Mapping[str, str]) -> LaunchedNodes:
    """Return the nodes and processes that `accelerate launch` starts.

    Args:
        options: Its options, which go before its configuration file.
        environ: Environment variables. They name the folder of the default configuration file.

    Raises:
        HolmesError: A hostfile cannot be read.
    """
    path = options.get("config-file", [""])[-1]
    if path and not Path(path).is_file():
        return LaunchedNodes("accelerate", error=f"there is no --config_file {path}")
    config = accelerate_config(path, environ)

    def value_of(name: str) -> str:
        return options.get(name.replace("_", "-"), [config.get(name, "")])[-1]

    nodes_text = value_of("num_machines")
    nodes = number_in(nodes_text) if nodes_text else 1
    world_size = number_in(value_of("num_processes"))
    if not nodes:  # a variable, for example
        error = "--num_machines is 0, and must be at least 1" if nodes_text == "0" else ""
        return LaunchedNodes(
            "accelerate", world_size=world_size, world_flag="--num_processes", error=error
        )
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


_READERS: dict[str, Callable[[Options, Mapping[str, str]], LaunchedNodes]] = {
    "torchrun": _read_torchrun,
    "deepspeed": _read_deepspeed,
    "mpirun": _read_mpirun,
    "srun": _read_srun,
    "accelerate": _read_accelerate,
}


@dataclass(frozen=True)
class StatedNodes:
    """Nodes and processes that a command's options state. Additions of launchers are left out.

    For example, deepspeed without a hostfile starts one node, whatever --num_nodes states.
    """

    nodes: int = 0  # 0: not stated
    processes: int = 0  # on each node; 0: not stated
    hosts: tuple[str, ...] = ()  # names of the nodes; () if they are not stated
    nodes_option: str = ""  # that states `nodes`, with its value: "--nnodes 4"
    processes_option: str = ""  # that states `processes`


#: Variables that a command may set for its launcher (NNODES=2 megatron sft ...), for ms-swift and others.
_VARIABLES = {"NNODES": "nodes", "NPROC_PER_NODE": "processes"}


def stated_nodes(command: Command) -> StatedNodes:
    """Return the nodes and processes that the options in a command state.

    If several launchers are in a command, each number is that of the last launcher that states it: srun
    starts one torchrun on each node, which starts the processes. A value that is no number, such as
    $SLURM_NNODES or 2:4, counts as not stated, but its option is kept.
    """
    words = list(command.launcher)
    if command.hidden_model:
        # Console commands, which have a hidden_model, take a launcher's options: tune run --nnodes 2
        words = list(command.words)
    found = find_launchers(words, NAMES_OF_LAUNCHER)
    in_launchers = sum(len(launcher_words) + 1 for _, launcher_words in found)
    before = tuple(words[: len(words) - in_launchers])
    result = StatedNodes()
    allocation: dict[str, WrittenOption] = {}  # options of sbatch: defaults of srun's options
    for name, launcher_words in [LauncherWords("", before), *found]:
        options = _options_by_meaning(launcher_words, NAMES_OF_LAUNCHER.get(name, OptionNames()))
        if name in ("sbatch", "salloc"):
            allocation = options
        elif name == "srun":
            options = {**allocation, **options}
        result = _stated_inside(options, result)
    # The scheduler may have more hosts than the launcher inside uses.
    return result if len(result.hosts) == result.nodes else replace(result, hosts=())


def _options_by_meaning(words: Sequence[str], names: OptionNames) -> dict[str, WrittenOption]:
    """Return the last option or variable of each meaning ("nodes", "processes", ...) among some words."""
    options = {}
    for option in written_options(words):
        meaning = names.meaning_of(option.name)
        if meaning:
            options[meaning] = option
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in _VARIABLES:
            options[_VARIABLES[name]] = WrittenOption(name, value, text=word)
    return options


def _stated_inside(options: Mapping[str, WrittenOption], outer: StatedNodes) -> StatedNodes:
    """Return the nodes and processes that a launcher's options and the launchers around it state.

    Args:
        options: "nodes", "processes", "total" or "hosts" -> the launcher's option.
        outer: Nodes and processes by the options of the launchers around it.
    """
    nodes = options.get("nodes", WrittenOption())
    processes = options.get("processes", WrittenOption())
    total = options.get("total", WrittenOption())
    total_number = number_in(total.value)
    per_node = number_in(processes.value)
    hosts = _stated_hosts(options["hosts"].value) if "hosts" in options else outer.hosts
    result = StatedNodes(outer.nodes, hosts=hosts, nodes_option=outer.nodes_option)
    if nodes.text:
        result = replace(result, nodes=number_in(nodes.value), nodes_option=nodes.text)
    elif "hosts" in options and hosts:
        result = replace(result, nodes=len(hosts), nodes_option=options["hosts"].text)
    elif total_number and per_node:
        text = f"{total.text} {processes.text}"
        result = replace(result, nodes=total_number // per_node, nodes_option=text)
    if processes.text:
        return replace(result, processes=per_node, processes_option=processes.text)
    if total_number and result.nodes and total_number % result.nodes == 0:
        count = total_number // result.nodes
        return replace(result, processes=count, processes_option=total.text)
    return result


def _stated_hosts(text: str) -> tuple[str, ...]:
    """Parse a list of hosts such as a[1-2] or a1:8,a2:8; () if the text is no such list."""
    try:
        items = expand(text, "hosts") if text else []
    except HolmesError:
        return ()
    names = [item.partition(":")[0] for item in items]
    if not all(name and name[0].isalnum() for name in names):
        return ()
    return tuple(dict.fromkeys(names))
