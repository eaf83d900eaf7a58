"""Reader of the output of ibstat, ibv_devinfo, nvidia-smi and lspci on a node.

    ibstat, ibstatus        ports with their state, link layer and rate
    ibv_devinfo             the same; the rate only with -v (active_width, active_speed)
    nvidia-smi              GPUs: the table, -L, or the columns of `topo -m`
    lspci                   GPUs, and NICs without their rates

A file has the output of one node, and its name is the node's: gpu01.txt. The outputs of several of these
programs may follow each other in it. `pdsh` and `clush` put "gpu01: " before each line; such a file may have
several nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from holmes_ext.cluster.gpus import gpu_name
from holmes_ext.cluster.nic import KINDS
from holmes_ext.cluster.sources.found import FoundNode
from holmes_ext.cluster.sources.hostfile import series_of
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of

#: Line that a parallel shell prints: "gpu01: CA 'mlx5_0'". Names of fields before a colon have no such rest.
_PREFIXED = re.compile(r"((?!0000:)[A-Za-z0-9][\w.-]*): ?(.*)")
#: Begin of the first line of each program's output, to find the prefix of a parallel shell.
_FIRST_LINES = re.compile(r"\s*(CA '|hca_id:|Infiniband device|GPU ?0|[0-9a-f]{2,4}:[0-9a-f]{2})")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CA = re.compile(r"CA '([^']+)'")
_HCA = re.compile(r"hca_id:\s*(\S+)")
_STATUS = re.compile(r"Infiniband device '([^']+)' port (\d+) status:?")
_PORT = re.compile(r"[Pp]ort\s*:?\s*(\d+):?")
_FIELD = re.compile(r"([A-Za-z_ ]+):\s*(.*)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)")
_WIDTH = re.compile(r"(\d+)X")
_GPU_COLUMN = re.compile(r"GPU\d+")
_LISTED_GPU = re.compile(r"GPU (\d+): (.+?)(?: \(UUID.*)?")
#: Row of nvidia-smi's table: |   0  NVIDIA A100-SXM4-80GB          On  | 00000000:07:00.0 Off |
_TABLE_ROW = re.compile(
    r"\|\s+(\d+)\s+((?:NVIDIA|Tesla|GeForce|Quadro)\b.*?)\s+(?:On|Off|N/A)\s+\|.*"
)
_PCI = re.compile(
    r"(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] ([^:]+?)(?: \[[0-9a-f]{4}\])?: (.*)"
)
_PCI_GPU_CLASSES = ("3D controller", "Processing accelerators")
_PCI_GPU_VENDORS = ("NVIDIA", "Advanced Micro Devices", "AMD")
_MODEL_IN_BRACKETS = re.compile(r"\[([^\[\]]*)\](?: \(rev \w+\))?$")
_PCI_NICS = {
    "slingshot": re.compile(r"Cassini|Cray Inc.*(?:0501|Slingshot)"),
    "efa": re.compile(r"Elastic Fabric Adapter"),
    "opa": re.compile(r"Omni-Path HFI"),
}
#: RDMA devices of software, which no cluster is built on: Soft-RoCE and Soft-iWARP.
_SOFTWARE = re.compile(r"(rxe|siw)")
#: Largest number of a node's GPUs in the result. A file with more is wrong.
_MANY_GPUS = 64
_MOST_NAMED = 6
_GIGA = 10**9


@dataclass(frozen=True)
class _Port:
    """Port of an RDMA device, as a program prints it. Empty and zero values are unknown."""

    device: str
    number: int = 1
    state: str = ""
    layer: str = ""
    transport: str = ""
    rate_bps: int = 0
    lanes: int = 0
    lane_bps: float = 0.0

    @property
    def is_up(self) -> bool:
        return "ACTIVE" in self.state.upper()

    @property
    def bits_per_s(self) -> int:
        return self.rate_bps or int(self.lanes * self.lane_bps)

    @property
    def is_usable(self) -> bool:
        """True if the port carries RDMA in hardware: software RDMA (_SOFTWARE) and iWARP do not count."""
        return not _SOFTWARE.match(self.device) and "iwarp" not in self.transport.lower()

    @property
    def kind(self) -> str:
        """Kind of NIC of this port, such as "ib"; "" if the printed values do not show it."""
        if self.device.startswith("hfi1"):
            return "opa"
        if self.device.startswith("erdma"):
            return "erdma"
        if self.layer == "InfiniBand":
            return "ib"
        if self.layer == "Ethernet":
            return "roce"
        return "efa" if self.transport.lower().startswith("unspecified") else ""


class ReadNode(NamedTuple):
    """A node, and notes for the user on the ports that its cluster.toml leaves out."""

    node: FoundNode
    notes: list[str]  # such as "gpu01: not counted: mlx5_4:1: down"


def read_outputs(paths: Sequence[str]) -> list[ReadNode]:
    """Return the nodes that files with the output of ibstat, ibv_devinfo, nvidia-smi or lspci describe.

    Raises:
        HolmesError: A file cannot be read, has no output of such a program, or does not say how many GPUs
            the node has.
    """
    nodes = []
    for path in paths:
        text = _ANSI.sub("", read_text(path, "name a file with the output of ibstat, for example"))
        for name, lines in _lines_of_nodes(text, Path(path).stem).items():
            nodes.append(_read_node(name, lines, path))
    return nodes


def _lines_of_nodes(text: str, name: str) -> dict[str, list[str]]:
    """Return the lines of each node in a text: of several nodes if a parallel shell wrote it.

    Args:
        text: The text of a file.
        name: Name of the node if the lines have no name before them.
    """
    lines = text.splitlines()
    prefixed = [_PREFIXED.fullmatch(line) for line in lines]
    is_prefixed = any(match and _FIRST_LINES.match(match[2]) for match in prefixed)
    if not is_prefixed:
        return {name: lines}
    nodes: dict[str, list[str]] = {}
    for match in filter(None, prefixed):
        nodes.setdefault(match[1], []).append(match[2])
    return nodes


def _read_node(name: str, lines: Sequence[str], path: str) -> ReadNode:
    """Return the node that some lines describe.

    Args:
        name: Name of the node.
        lines: Output of ibstat, ibv_devinfo, nvidia-smi or lspci on the node, or of several of them.
        path: File with the lines, for messages.

    Raises:
        HolmesError: The lines have no output of such a program, or do not say how many GPUs there are.
    """
    gpus = _gpus(lines)
    ports = _ports(lines)
    pci_kind = _kind_in_lspci(lines)
    if not gpus.number and not ports and not pci_kind:
        raise HolmesError(
            f"{path}: nothing here is the output of ibstat, ibv_devinfo, nvidia-smi (also with -L or topo -m)"
            " or lspci"
        )
    if not gpus.number:
        raise HolmesError(
            f"{path}: the number of GPUs of {name} is not in it; on that node: nvidia-smi -L >> {path}"
        )
    # The outputs do not name the network. Nodes of a series of names (gpu01, gpu02) should share a network.
    fabric = series_of(name)
    node = FoundNode(
        name, gpus.number, kind=pci_kind, gpu=gpus.name, fabric=fabric, labels=(fabric,)
    )
    if not ports:
        return ReadNode(node, [])
    kind, used, notes = _used_ports(ports)
    rate_bps = sum(port.bits_per_s for port in used)
    if not all(port.bits_per_s for port in used):
        rate_bps = 0
    notes = [f"{name}: {line}" for line in notes]
    return ReadNode(replace(node, kind=kind or pci_kind, rate_bps=rate_bps), notes)


class _Gpus(NamedTuple):
    """Number and model of a node's GPUs."""

    number: int  # of GPUs
    name: str  # their model, such as "H100"; "" if it is not in the output, or they differ


def _gpus(lines: Sequence[str]) -> _Gpus:
    """Return number and model of the GPUs in the output of nvidia-smi, or else of lspci."""
    names: dict[int, str] = {}  # index of a GPU -> its model, from nvidia-smi or nvidia-smi -L
    columns: set[str] = set()  # GPU0, GPU1, ... of the matrix of nvidia-smi topo -m, without models
    pci_names = []  # models in the output of lspci
    for line in lines:
        text = line.strip()
        listed = _LISTED_GPU.fullmatch(text) or _TABLE_ROW.fullmatch(text)
        device = _PCI.fullmatch(text)
        words = text.split()
        if listed:
            names[int(listed[1])] = listed[2]
        # The matrix has the header "GPU0 GPU1 ...". Its first row begins with "GPU0 X", and is skipped.
        elif words and words[0] == "GPU0" and "X" not in words[:2]:
            columns |= {word for word in words if _GPU_COLUMN.fullmatch(word)}
        elif device and device[1] in _PCI_GPU_CLASSES and device[2].startswith(_PCI_GPU_VENDORS):
            model = _MODEL_IN_BRACKETS.search(device[2])
            pci_names.append(model[1] if model else "")
    number = len(names) or len(columns) or len(pci_names)
    kinds = {gpu_name(name) for name in names.values() or pci_names if name}
    name = kinds.pop() if len(kinds) == 1 else ""
    return _Gpus(min(number, _MANY_GPUS), name)


def _ports(lines: Sequence[str]) -> list[_Port]:
    """Return the ports in the output of ibstat, ibstatus or ibv_devinfo."""
    ports: list[_Port] = []
    device = ""
    transport = ""
    for line in lines:
        text = line.strip()
        status = _STATUS.fullmatch(text)
        begin = _CA.fullmatch(text) or _HCA.fullmatch(text)
        port = _PORT.fullmatch(text)
        field = _FIELD.fullmatch(text)
        if status:
            device = status[1]
            ports.append(_Port(device, int(status[2])))
        elif begin:
            device = begin[1]
            transport = ""
        elif port and device:
            ports.append(_Port(device, int(port[1]), transport=transport))
        elif field and field[1] == "transport":
            transport = field[2]
        elif field and ports and ports[-1].device == device:
            ports[-1] = _with_field(ports[-1], field[1].strip().lower().replace("_", " "), field[2])
    return ports


def _with_field(port: _Port, name: str, value: str) -> _Port:
    """Return a port with the value of a line such as "State: Active".

    A line that is not needed here leaves the port as it is.

    Args:
        port: The port.
        name: First part of the line in lower case: "state", "rate", "link layer", "active width" ...
        value: Its value, such as "Active", "4: ACTIVE", "200 Gb/sec (4X HDR)" or "25.0 Gbps (32)".
    """
    number = _RATE.match(value)
    if name == "state":
        return replace(port, state=value)
    if name == "link layer":
        return replace(port, layer=value.split()[0] if value else "")
    if name == "rate" and number:
        return replace(port, rate_bps=int(float(number[1]) * _GIGA))
    # ibv_devinfo -v has the number of lanes ("active width: 4X") and the speed of a lane ("active speed").
    if name == "active width":
        width = _WIDTH.match(value)
        return replace(port, lanes=int(width[1]) if width else 0)
    if name == "active speed" and number:
        return replace(port, lane_bps=float(number[1]) * _GIGA)
    return port


class _UsedPorts(NamedTuple):
    """Ports of a node's NICs that carry its traffic to the other nodes of the cluster."""

    kind: str  # of the NICs, such as "ib"; "" if it is not known
    ports: list[_Port]
    notes: list[str]  # on ports that are left out


def _used_ports(ports: Sequence[_Port]) -> _UsedPorts:
    """Return the ports to use: those that are up, of the first kind in KINDS, and with the highest rate.

    Slower ports mostly belong to storage or management: a DGX H100 has 8 ports of 400 Gb/s for its GPUs.

    Args:
        ports: All ports of a node.
    """
    up = [port for port in ports if port.is_up and port.is_usable]
    if not up:
        return _UsedPorts("", [], [f"no port of a fast NIC is up ({_named(ports)})"])
    kinds = [kind for kind in KINDS if any(port.kind == kind for port in up)]
    kind = kinds[0] if kinds else ""
    of_kind = [port for port in up if port.kind == kind]
    fastest_bps = max(port.bits_per_s for port in of_kind)
    used = [port for port in of_kind if port.bits_per_s == fastest_bps]
    notes = []
    left_out = {
        "down": [port for port in ports if not port.is_up],
        f"not {kind or 'a fast NIC'}": [
            port for port in ports if port.is_up and port not in of_kind
        ],
        "slower than the others": [port for port in of_kind if port not in used],
    }
    for reason, group in left_out.items():
        if group:
            notes.append(f"not counted: {_named(group)}: {reason}")
    return _UsedPorts(kind, used, notes)


def _named(ports: Sequence[_Port]) -> str:
    return some_of([f"{port.device}:{port.number}" for port in ports], _MOST_NAMED)


def _kind_in_lspci(lines: Sequence[str]) -> str:
    """Return the kind of the fast NICs in lspci's output, "" if it shows none or several.

    An Ethernet controller may be RoCE or not, so it gives no kind.
    """
    kinds = set()
    for line in lines:
        device = _PCI.fullmatch(line.strip())
        if device is None:
            continue
        if device[1].lower() == "infiniband controller":
            kinds.add("ib")
        kinds |= {kind for kind, pattern in _PCI_NICS.items() if pattern.search(device[2])}
    return kinds.pop() if len(kinds) == 1 else ""
