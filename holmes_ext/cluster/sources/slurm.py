"""Reader of Slurm's nodes: `scontrol show node`, `scontrol show topology`.

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

from holmes_ext.cluster.sources.found import FoundNode, gpu_name, kind_of
from holmes_ext.cluster.sources.topology import Topology, parse_topology
from holmes_ext.cluster.spec import KNOWN_GPUS
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
#: Base states in which a node can start a job.
_FREE_STATES = ("IDLE",)
#: Flags, after "+" in the state, with which a node cannot start a job.
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
_GPU = re.compile(r"gpu(?::([A-Za-z][^:(),]*))?(?::(\d+))?(?:\([^)]*\))?")


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
    # The message has room for one line of the output: the last one.
    reason = lines[-1] if lines else f"status {process.returncode}"
    raise HolmesError(f"`{command}` failed: {reason:.200}")


def check_version() -> None:
    """Raise HolmesError if Slurm is older than OLDEST, or munge is not running.

    Without munge, Slurm's commands would retry for a long time. No error is raised if munge's
    socket does not exist at its usual path: munge may use another one, and Slurm another
    authentication.
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


def parse_nodes(text: str, topology: Topology, partitions: Sequence[str] = ()) -> list[FoundNode]:
    """Return the nodes with GPUs. If no node has a GPU, return all nodes, each with one process.

    Args:
        text: Output of `scontrol show node --oneliner`.
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
            gpu = _gpu_in_features(features)
        nodes.append(
            FoundNode(
                name,
                processes=gpus.number,
                kind=kind_of(features),
                gpu=gpu_name(gpu),
                fabric=fabric_of.get(name, ""),
                labels=(*node_partitions, *features),
                why_not=_reason_unusable(record.get("State", "")),
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
            if not _reason_unusable(record.get("State", ""))
        ],
        features={record["NodeName"]: _features_of(record) for record in records},
    )


def _parse_records(text: str) -> list[dict[str, str]]:
    """Return the fields of every node in the output of `scontrol show node --oneliner`."""
    records = [_parse_fields(line) for line in text.splitlines()]
    return [record for record in records if "NodeName" in record]


def _parse_fields(line: str) -> dict[str, str]:
    """Return the fields of a line such as "NodeName=a0 Gres=gpu:8 OS=Linux 6.1 #1 SMP ...".

    A value may have spaces: it ends where the next KEY= begins.
    """
    matches = list(_FIELD.finditer(line))
    ends = [match.start() for match in matches[1:]] + [len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(matches, ends)}


def _split_words(text: str | None) -> list[str]:
    """Return the words of a comma-separated value, [] for Slurm's empty value "(null)"."""
    return [word for word in (text or "").split(",") if word and word != "(null)"]


def _features_of(record: Mapping[str, str]) -> list[str]:
    return _split_words(record.get("AvailableFeatures"))


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


def _gpu_in_features(features: Sequence[str]) -> str:
    """Return the GPU model that the features of a node name, "" for none or several."""
    models = {gpu_name(feature) for feature in features}.intersection(KNOWN_GPUS)
    if len(models) != 1:
        return ""
    return models.pop()


def _reason_unusable(state: str) -> str:
    """Return the reason why a node cannot start a job, "" if it can.

    Args:
        state: State of the node in Slurm: "IDLE", "MIXED", "IDLE+DRAIN", "DOWN*". The star marks a
            node that does not respond; other characters at the end concern power saving and
            reservations.
    """
    base, *flags = state.rstrip("*~#!%$@^-").split("+")
    if base not in _FREE_STATES:
        return base.lower() or "unknown"
    for flag in flags:
        if flag in _UNAVAILABLE_FLAGS:
            return flag.lower().replace("_", " ")
    return "not responding" if state.endswith("*") else ""
