"""Reader of Slurm's nodes: `scontrol show node`, `scontrol show topology`, or NodeName lines of slurm.conf.

kind of NIC    a feature names it (ib, hdr, roce, ...); otherwise it comes from the user
processes      one for each GPU of the node's generic resources (gres)
GPU            type of the gres; otherwise a feature (h100)
fabric         the topmost switch above the node in the topology. If nodes below that switch have
               different kinds of NICs, it is no real switch (sites invent one above all nodes, so
               that Slurm has one tree), and it is not taken for a fabric
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from packaging.version import Version

from holmes_ext.cluster.gpus import gpu_name, names_one_model
from holmes_ext.cluster.sources.found import FoundNode, kind_of
from holmes_ext.cluster.sources.hostlist import expand
from holmes_ext.cluster.sources.topology import Topology, parse_topology
from holmes_ext.document import read_standard_input, read_text
from holmes_ext.errors import HolmesError
from holmes_ext.words import why

#: Oldest supported Slurm: the first that calls heterogeneous jobs "hetjob".
OLDEST = Version("20.02")
#: Seconds that a Slurm command may take. The command itself waits for a controller that does not
#: answer.
PATIENCE = 60.0
#: Socket of Slurm's authentication service munge (MUNGE_SOCKET_NAME in its source).
_MUNGE_SOCKET = "/run/munge/munge.socket.2"
_MUNGE_ADVICE = "start munged, or ask the cluster's administrators"
#: Base states of a node that can start a job.
_FREE_STATES = ("IDLE",)
#: Flags, after "+" in the state, of a node that cannot start a job.
_UNAVAILABLE_FLAGS = (
    "DRAIN",
    "DOWN",
    "FAIL",
    "MAINT",
    "POWERING_DOWN",
    "REBOOT_ISSUED",
    "NOT_RESPONDING",
    "RESERVED",
    "INVALID_REG",
)
_FIELD = re.compile(r"(?:^| )([A-Za-z][\w:]*)=")
#: Item of a list whose items may have commas in brackets: "gpu:a100:4(S:0,1),craynetwork:4".
_ITEM = re.compile(r"(?:[^,(]|\([^)]*\))+")
#: GPUs in the generic resources of a node: "gpu:h100:8(S:0-1)", "gpu:8", "gpu:a100_3g.40gb:4".
_GPU = re.compile(r"gpu(?::(\d*[A-Za-z][^:(),]*))?(?::(\d+))?(?:\([^)]*\))?")
#: Features of nodes in the output of scontrol, and in slurm.conf.
_FEATURE_KEYS = ("AvailableFeatures", "Features", "Feature")
#: Keys that describe a node in slurm.conf or in the output of scontrol. Other files of Slurm (gres.conf,
#: job_container.conf) have NodeName lines without them.
_HARDWARE_KEYS = ("CPUs=", "CPUTot=", "Procs=", "Sockets=", "RealMemory=", "Gres=", "State=")
_FILE_ADVICE = "write it with: scontrol show node --oneliner > nodes.txt"


class NodeStates(NamedTuple):
    """Nodes of a Slurm cluster that are idle now, and the features of all nodes."""

    idle: list[str]  # names of the nodes on which a job could start now
    features: dict[str, list[str]]  # every node -> its features


class _Gpus(NamedTuple):
    """GPUs of one node."""

    model: str  # "" if the resources do not name it
    number: int


def run_command(*argv: str) -> str:
    """Return the output of a Slurm command.

    Args:
        argv: The command and its arguments.

    Raises:
        HolmesError: Slurm is not installed, its controller or munge does not answer, or the command
            fails.
    """
    command = " ".join(argv)
    try:
        process = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        raise HolmesError(
            f"there is no `{argv[0]}` on this machine: run it on a login node of the Slurm "
            "cluster (module load slurm?)"
        ) from None
    except subprocess.TimeoutExpired:
        raise HolmesError(
            f"`{command}` does not answer within {PATIENCE:g} s; is slurmctld alive"
            " (scontrol ping)?"
        ) from None
    except OSError as error:
        raise HolmesError(f"`{argv[0]}` cannot be started: {why(error)}") from None
    if process.returncode == 0:
        return process.stdout
    output = process.stderr or process.stdout
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    about_munge = [line for line in lines if "munge" in line.lower()]
    if about_munge:
        raise HolmesError(
            f"Slurm's munge does not answer on this machine ({about_munge[-1]:.160}); {_MUNGE_ADVICE}"
        )
    # The message has room for one line of the output: the last.
    reason = lines[-1] if lines else f"status {process.returncode}"
    raise HolmesError(f"`{command}` failed: {reason:.200}")


def check_version() -> None:
    """Raise HolmesError if Slurm is older than OLDEST, or munge is not running.

    Without munge, Slurm's commands would retry for a long time. No error is raised if munge's
    socket does not exist at its usual path: munge may use another path, and Slurm another authentication.
    """
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as munge:
        try:
            munge.connect(_MUNGE_SOCKET)
        except ConnectionRefusedError:
            raise HolmesError(
                f"Slurm's munge does not answer on this machine ({_MUNGE_SOCKET}: nobody listens); "
                f"{_MUNGE_ADVICE}"
            ) from None
        except PermissionError:
            pass  # Slurm's commands may have the permission
    answer = run_command("scontrol", "--version")
    match = re.search(r"slurm\D* (\d+\.\d+)", answer)
    if match and Version(match[1]) < OLDEST:
        raise HolmesError(
            f"{answer.strip()} is too old: holmes reads Slurm {OLDEST.major}.{OLDEST.minor:02d} and newer"
        )


def nodes_of_slurm(
    partitions: Sequence[str] = (), topology: Topology | None = None
) -> list[FoundNode]:
    """Return the nodes of the Slurm cluster that this machine belongs to.

    Args:
        partitions: Partitions whose nodes are wanted; () for all nodes.
        topology: Topology to use instead of Slurm's own.

    Raises:
        HolmesError: Slurm does not answer, or a partition has no node.
    """
    check_version()
    listed = run_command("scontrol", "show", "node", "--oneliner")
    if topology is None:
        topology = parse_topology(
            run_command("scontrol", "show", "topology"), "scontrol show topology"
        )
    return parse_nodes(listed, topology, partitions)


def nodes_of_file(
    path: str, partitions: Sequence[str] = (), topology: Topology | None = None
) -> list[FoundNode]:
    """Return the nodes in a file with the output of `scontrol show node`, or in a slurm.conf.

    Args:
        path: The file, "-" for standard input.
        partitions: Partitions whose nodes are wanted; () for all nodes.
        topology: Topology of the network. None if it is not known: the nodes then have no fabric.

    Raises:
        HolmesError: the file cannot be read or has no nodes, or a partition has no node.
    """
    text = read_standard_input(_FILE_ADVICE) if path == "-" else read_text(path, _FILE_ADVICE)
    if "NodeName=" not in text:
        raise HolmesError(f"{path}: no line has NodeName=; {_FILE_ADVICE}")
    # Lines of Slurm's other files begin with NodeName=, too. The most likely mistake is gres.conf. Its
    # lines name the devices of GPUs (File=/dev/nvidia0).
    if not any(key in text for key in _HARDWARE_KEYS) or "File=/dev/" in text:
        raise HolmesError(
            f"{path}: its NodeName lines do not describe hardware: not slurm.conf; {_FILE_ADVICE}"
        )
    return parse_nodes(text, topology or parse_topology("", path), partitions)


def parse_nodes(text: str, topology: Topology, partitions: Sequence[str] = ()) -> list[FoundNode]:
    """Return the nodes with GPUs. If no node has a GPU, return all nodes, each with one process.

    Args:
        text: Output of `scontrol show node`, with or without --oneliner, or content of a slurm.conf.
        topology: Topology of the network.
        partitions: Partitions whose nodes are wanted; () for all nodes.

    Raises:
        HolmesError: a partition has no node.
    """
    records = _parse_records(text)
    _check_partitions(records, partitions)
    fabric_of = topology.fabric_of
    nodes = []
    for record in records:
        name = record["NodeName"]
        node_partitions = _split_words(record.get("Partitions"))
        if partitions and not set(partitions).intersection(node_partitions):
            continue
        features = _features_of(record)
        gpus = _parse_gpus(record.get("Gres", ""))
        gpu = gpus.model
        if gpus.number and not gpu:
            gpu = names_one_model(features)
        nodes.append(
            FoundNode(
                name,
                processes=gpus.number,
                kind=kind_of(features),
                gpu=gpu_name(gpu),
                fabric=fabric_of.get(name, ""),
                labels=(*node_partitions, *features),
                why_not=_reason_unusable(record.get("State", "UNKNOWN")),
            )
        )
    with_gpus = [node for node in nodes if node.processes]
    return with_gpus or [replace(node, processes=1) for node in nodes]


def _check_partitions(records: Sequence[Mapping[str, str]], partitions: Sequence[str]) -> None:
    """Raise HolmesError if a partition has no node.

    Args:
        records: Fields of every node.
        partitions: Names of partitions.
    """
    existing = {name for record in records for name in _split_words(record.get("Partitions"))}
    for name in partitions:
        if name not in existing:
            raise HolmesError(
                f"--partition {name!r}: Slurm has no node in it; its partitions are"
                f" {', '.join(sorted(existing)) or 'none'}"
            )


def idle_nodes() -> NodeStates:
    """Return the nodes on which a job could start now, and the features of every node.

    Raises:
        HolmesError: Slurm does not answer.
    """
    check_version()
    records = _parse_records(run_command("scontrol", "show", "node", "--oneliner"))
    return NodeStates(
        idle=[
            record["NodeName"]
            for record in records
            if not _reason_unusable(record.get("State", "UNKNOWN"))
        ],
        features={record["NodeName"]: _features_of(record) for record in records},
    )


def _parse_records(text: str) -> list[dict[str, str]]:
    """Return the fields of every node in the output of `scontrol show node`, or in a slurm.conf.

    A node begins with NodeName=, and may go on over several lines: those of scontrol without
    --oneliner are indented, those of slurm.conf end with a backslash. In slurm.conf, NodeName= may
    list several nodes, and NodeName=DEFAULT gives the fields of the nodes below it.
    """
    joined = re.sub(r"\\\n|\n[ \t]+", " ", text)
    records: list[dict[str, str]] = []
    defaults: dict[str, str] = {}
    partitions_of: dict[str, list[str]] = {}  # node -> partitions, by the PartitionName= lines
    for line in joined.splitlines():
        fields = _parse_fields(line.strip())
        name = fields.get("NodeName", "")
        if name.upper() == "DEFAULT":
            defaults = fields
        elif name:
            for node in expand(name, "NodeName"):
                records.append({**defaults, **fields, "NodeName": node})
        elif "PartitionName" in fields and "Nodes" in fields:
            for node in _nodes_of_partition(fields["Nodes"]):
                partitions_of.setdefault(node, []).append(fields["PartitionName"])
    for record in records:
        partitions = partitions_of.get(record["NodeName"], []) + partitions_of.get("ALL", [])
        if partitions:
            record.setdefault("Partitions", ",".join(partitions))
    return records


def _nodes_of_partition(text: str) -> list[str]:
    """Return the nodes in the Nodes= of a partition of slurm.conf: "a[01-02]" gives a01 and a02.

    A value in parentheses does not list nodes by their names, and gives none.
    """
    if text.startswith("("):
        return []
    return expand(text, "PartitionName")


def _parse_fields(line: str) -> dict[str, str]:
    """Return the fields (name -> value) of a line such as "NodeName=a0 Gres=gpu:8 OS=Linux 6.1 ...".

    A value may contain spaces: it ends where the next KEY= begins. A comment line has no fields.
    """
    if line.startswith("#"):
        return {}
    matches = list(_FIELD.finditer(line))
    ends = [match.start() for match in matches[1:]] + [len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(matches, ends)}


def _split_words(text: str | None) -> list[str]:
    """Return the words of a comma-separated value, [] for Slurm's empty value "(null)"."""
    return [word for word in (text or "").split(",") if word and word != "(null)"]


def _features_of(record: Mapping[str, str]) -> list[str]:
    values = [record[key] for key in _FEATURE_KEYS if key in record]
    return _split_words(values[0] if values else None)


def _parse_gpus(gres: str) -> _Gpus:
    """Return the first GPU model in the gres of a node, and the number of all its GPUs."""
    models: list[str] = []
    count = 0
    for item in _ITEM.findall(gres):
        match = _GPU.fullmatch(item)
        if match:
            models.append(match[1] or "")
            count += int(match[2] or 1)
    return _Gpus(models[0] if models else "", count)


def _reason_unusable(state: str) -> str:
    """Return the reason why a node cannot start a job, "" if it can.

    Args:
        state: State of the node in Slurm: "IDLE", "MIXED", "IDLE+DRAIN", "DOWN*", "IDLE*+DRAIN". The star
            marks a node that does not respond; other such characters concern power saving and
            reservations.
    """
    if state.upper() == "UNKNOWN":  # slurm.conf does not contain states
        return ""
    base, *flags = [part.rstrip("*~#!%$@^-") for part in state.split("+")]
    if base not in _FREE_STATES:
        return base.lower() or "unknown"
    for flag in flags:
        if flag in _UNAVAILABLE_FLAGS:
            return flag.lower().replace("_", " ")
    return "not responding" if "*" in state else ""
