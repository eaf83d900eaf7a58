"""What Slurm knows of its nodes: `scontrol show node`, `scontrol show topology`, `sinfo`.

Kind of NIC: from features (ib, hdr, roce, ...), else asked for. Processes: GPUs of the gres, else none; their
type from there, else from a feature (h100).
Fabric: the uppermost switch of the topology; where it joins nodes of different kinds, it is a switch that the
site made up.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Sequence

from packaging.version import Version

from holmes_ext.cluster.sources.found import FoundNode, gpu_name, kind_of
from holmes_ext.cluster.sources.topology import Topology, parse_topology
from holmes_ext.cluster.spec import KNOWN_GPUS
from holmes_ext.errors import HolmesError
from holmes_ext.words import why

#: The oldest Slurm whose words are read: heterogeneous jobs are called so from here on.
OLDEST = Version("20.02")
#: Seconds for a command of Slurm's, which itself waits for a controller that does not answer.
PATIENCE = 60.0
_MUNGE = "/run/munge/munge.socket.2"  # MUNGE_SOCKET_NAME of its source
_MEND = "start munged, or ask the cluster's administrators"
#: Base states in which a node takes jobs, and flags (after "+") with which it does not.
_FREE = ("IDLE",)
_OUT = (
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
#: What commas outside brackets divide: "gpu:a100:4(S:0,1),craynetwork:4".
_ITEM = re.compile(r"(?:[^,(]|\([^)]*\))+")
#: gres/gpu of one node: "gpu:h100:8(S:0-1)", "gpu:8", "gpu:a100_3g.40gb:4".
_GPU = re.compile(r"gpu(?::([A-Za-z][^:(),]*))?(?::(\d+))?(?:\([^)]*\))?")


def ask(*argv: str) -> str:
    """What a command of Slurm's prints; HolmesError where it fails, Slurm is absent, or munge is silent."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        raise HolmesError(
            f"there is no `{argv[0]}` on this machine: run it on a login node of the Slurm "
            "cluster (module load slurm?)"
        ) from None
    except subprocess.TimeoutExpired:
        raise HolmesError(
            f"`{' '.join(argv)}` does not answer within {PATIENCE:g} s; is slurmctld alive"
            " (scontrol ping)?"
        ) from None
    except OSError as error:
        raise HolmesError(f"`{argv[0]}` cannot be started: {why(error)}") from None
    if done.returncode == 0:
        return done.stdout
    said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    munge = [line for line in said if "munge" in line.lower()]
    if munge:
        raise HolmesError(
            f"Slurm's munge does not answer on this machine ({munge[-1]:.160}); {_MEND}"
        )
    raise HolmesError(
        f"`{' '.join(argv)}` failed: {said[-1] if said else f'status {done.returncode}':.200}"
    )


def check_version() -> None:
    """HolmesError for a Slurm older than OLDEST, or a dead socket of munge (commands try it for long)."""
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as munge:
        try:
            munge.connect(_MUNGE)
        except ConnectionRefusedError:
            raise HolmesError(
                f"Slurm's munge does not answer on this machine ({_MUNGE}: nobody listens); {_MEND}"
            ) from None
        except PermissionError:
            pass  # Slurm says what it makes of it
    said = ask("scontrol", "--version")
    match = re.search(r"slurm\D* (\d+\.\d+)", said)
    if match and Version(match[1]) < OLDEST:
        raise HolmesError(
            f"{said.strip()} is too old: holmes reads Slurm {OLDEST.major}.{OLDEST.minor:02d} and newer"
        )


def nodes_of_slurm(
    partitions: Sequence[str] = (), topology: Topology | None = None
) -> list[FoundNode]:
    """All nodes that Slurm knows (of these partitions); topology: in place of Slurm's own."""
    check_version()
    listed = ask("scontrol", "show", "node", "--oneliner")
    if topology is None:
        topology = parse_topology(ask("scontrol", "show", "topology"), "scontrol show topology")
    return parse_nodes(listed, topology, partitions)


def parse_nodes(text: str, topology: Topology, partitions: Sequence[str] = ()) -> list[FoundNode]:
    """Of `scontrol show node --oneliner`; nodes without GPUs only where none has any. HolmesError: an empty
    partition."""
    records = [record for record in map(_fields, text.splitlines()) if "NodeName" in record]
    known = {name for record in records for name in _words(record.get("Partitions"))}
    for name in partitions:
        if name not in known:
            raise HolmesError(
                f"--partition {name!r}: Slurm has no node in it; its partitions are"
                f" {', '.join(sorted(known)) or 'none'}"
            )
    fabric_of = topology.fabric_of
    nodes = []
    for record in records:
        name, node_partitions = record["NodeName"], _words(record.get("Partitions"))
        features = _features(record)
        if partitions and not set(partitions).intersection(node_partitions):
            continue
        gpu, count = _gpus(record.get("Gres", ""))
        if count and not gpu:
            models = {gpu_name(feature) for feature in features}.intersection(KNOWN_GPUS)
            gpu = models.pop() if len(models) == 1 else ""
        nodes.append(
            FoundNode(
                name,
                count,
                kind_of(features),
                gpu_name(gpu),
                fabric_of.get(name, ""),
                group=(*node_partitions, *features),
                why_not=_why_not(record.get("State", "")),
            )
        )
    with_gpus = [node for node in nodes if node.processes]
    return with_gpus or [FoundNode(**{**vars(node), "processes": 1}) for node in nodes]


def idle_nodes() -> tuple[list[str], dict[str, list[str]]]:
    """Those on which a job could start now, and the features of every node, as Slurm says."""
    check_version()
    records = [
        record
        for record in map(_fields, ask("scontrol", "show", "node", "--oneliner").splitlines())
        if "NodeName" in record
    ]
    idle = [record["NodeName"] for record in records if not _why_not(record.get("State", ""))]
    return idle, {record["NodeName"]: _features(record) for record in records}


def _fields(line: str) -> dict[str, str]:
    """ "NodeName=a0 Gres=gpu:8 OS=Linux 6.1 #1 SMP ..." by key; a value may hold spaces."""
    places = list(_FIELD.finditer(line))
    ends = [place.start() for place in places[1:]] + [len(line)]
    return {place[1]: line[place.end() : end].strip() for place, end in zip(places, ends)}


def _words(text: str | None) -> list[str]:
    return [word for word in (text or "").split(",") if word and word != "(null)"]


def _features(record: dict[str, str]) -> list[str]:
    return _words(record.get("AvailableFeatures"))


def _gpus(gres: str) -> tuple[str, int]:
    """Type and number of a node's GPUs, all of them; ("", 0) for none."""
    kinds: list[str] = []
    count = 0
    for match in map(_GPU.fullmatch, _ITEM.findall(gres)):
        if match:
            kinds.append(match[1] or "")
            count += int(match[2] or 1)
    return (kinds[0] if kinds else ""), count


def _why_not(state: str) -> str:
    """ "" for "IDLE", what keeps a job off for "MIXED", "IDLE+DRAIN", "DOWN*"."""
    base, *flags = state.rstrip("*~#!%$@^-").split("+")
    if base not in _FREE:
        return base.lower() or "unknown"
    out = [flag for flag in flags if flag in _OUT]
    if out or state.endswith("*"):
        return (out[0] if out else "not responding").lower().replace("_", " ")
    return ""
