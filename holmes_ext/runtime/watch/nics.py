"""Reads the state of this node's NICs while the job runs: link, error counters, and answers of neighbours.

The kernel is the source, not the training framework:

    link       the flags of the network interface (in this process's network namespace), and the state of each
               port of an HCA, i.e. of the RDMA device of the same NIC
    counters   /sys/class/net and /sys/class/infiniband
    answers    a connection attempt to a neighbour. A refusal is an answer: the neighbour's kernel is alive.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holmes_ext.cluster.fabric import ETHERNET

if TYPE_CHECKING:
    from holmes_ext.cluster.site import Node, Port
    from holmes_ext.runtime.session import Session

# Linux: ioctl(SIOCGIFFLAGS) fills struct ifreq (name, flags), see netdevice(7).
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1
_IFF_RUNNING = 0x40
_IFREQ = struct.Struct("16sH14x")
_LONGEST_NAME = 15  # bytes of an interface's name
#: Fields of a line of /proc/net/dev, after the interface's name.
_RECEIVED_BYTES = 0
_SENT_BYTES = 8
_HEADER_LINES = 2  # of /proc/net/dev
_BYTES_PER_DATA_UNIT = 4  # of the InfiniBand counters port_xmit_data and port_rcv_data

#: Seconds until a neighbour's kernel must answer.
PROBE_S = 3.0
#: TCP port "discard", for connection attempts to neighbours. It is nearly always closed, so the kernel
#: refuses.
_PROBED_PORT = 9
#: Most ports of neighbours for connection attempts, all at the same time and each in a thread.
_MOST_PROBES = 8
#: Error counters below /sys/class/net/INTERFACE. If they grow, the link is bad.
_NET_COUNTERS = (
    "carrier_down_count",
    "statistics/rx_errors",
    "statistics/tx_errors",
    "statistics/tx_carrier_errors",
    "statistics/rx_dropped",
    "statistics/tx_dropped",
)
#: Error counters below /sys/class/infiniband/HCA/ports/NUMBER.
_HCA_COUNTERS = (
    "counters/link_downed",
    "counters/link_error_recovery",
    "counters/symbol_error",
    "counters/port_rcv_errors",
    "counters/port_xmit_discards",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/packet_seq_err",
)
#: Name of a port -> counter -> value at the start of the job.
_at_start: dict[str, dict[str, int]] = {}


def in_use(current: Session) -> list[Port]:
    """Return the NIC ports of this node that its process groups use, and those of Ethernet.

    While there are no groups yet, all usable ports are returned.
    """
    fabrics = {record.transport.fabric for record in current.groups}
    usable_ports = [port for port in current.node.ports if port.usable]
    if not fabrics:
        return usable_ports
    return [port for port in usable_ports if port.fabric in fabrics or port.fabric == ETHERNET]


def trouble(port: Port) -> str:
    """Return why a NIC port cannot carry data, in words such as "has no link"; "" if it can."""
    if port.interface:
        problem = _interface_trouble(port.interface)
        if problem:
            return problem
    for hca in port.hcas:
        state = _read(_hca_folder(hca) / "state")
        if state is not None and "ACTIVE" not in state:
            return f"has its port {hca} in state {state}"
    return ""


def _interface_trouble(name: str) -> str:
    """Return why a network interface cannot carry data, in words; "" if it can.

    The kernel returns the interface's flags through any socket (SIOCGIFFLAGS, netdevice(7)).
    """
    request = _IFREQ.pack(name.encode()[:_LONGEST_NAME], 0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        except OSError as error:  # there is no such interface
            return f"is gone ({error.strerror})"
    _, flags = _IFREQ.unpack(answer)
    if not flags & _IFF_UP:
        return "is set down"
    if not flags & _IFF_RUNNING:  # no carrier
        return "has no link"
    return ""


def _hca_folder(hca: str) -> Path:
    """Return the sysfs folder of an HCA's port. `hca` is "mlx5_0:1"; without ":1", the port is 1."""
    device, _, number = hca.partition(":")
    sysfs = Path(os.environ.get("HOLMES_SYSFS") or "/sys")
    return sysfs / "class/infiniband" / device / "ports" / (number or "1")


def _read(path: Path) -> str | None:
    """Return the content of a file without white space around it; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return None


def counters(ports: list[Port]) -> dict[str, dict[str, int]]:
    """Return the error counters of ports, as far as the kernel and the driver have them.

    Returns:
        Name of a port -> counter -> value. Counters of several HCAs of a port are added up.
    """
    counters_of: dict[str, dict[str, int]] = {}
    for port in ports:
        values = counters_of.setdefault(port.name, {})
        files = []
        if port.interface:
            interface_folder = Path("/sys/class/net") / port.interface
            files += [interface_folder / name for name in _NET_COUNTERS]
        for hca in port.hcas:
            files += [_hca_folder(hca) / name for name in _HCA_COUNTERS]
        for file in files:
            text = _read(file)
            if text is not None and text.isdecimal():  # None: the driver does not have this counter
                values[file.name] = values.get(file.name, 0) + int(text)
    return counters_of


def remember_counters(current: Session) -> None:
    """Store the error counters of this node's ports at the start of the job, for grown()."""
    _at_start.update(counters([port for port in current.node.ports if port.usable]))


def grown(now: dict[str, dict[str, int]], port: Port) -> str:
    """Describe how a NIC port's error counters have grown since the start of the job.

    Args:
        now: The result of counters().
        port: The port.

    Returns:
        E.g. "carrier_down_count +1, tx_errors +3"; "" if none has grown.
    """
    before = _at_start.get(port.name, {})  # as remember_counters() has stored them
    increases = []
    for name, value in now.get(port.name, {}).items():
        increase = value - before.get(name, value)  # 0 for a counter that was not stored
        if increase > 0:
            increases.append(f"{name} +{increase}")
    return ", ".join(increases)


def bytes_carried(node: Node) -> dict[str, int]:
    """Return the bytes that each network interface of this node has received and sent.

    RDMA traffic is not in the counters of an interface, so those of its HCAs are added.
    """
    carried: dict[str, int] = {}  # interface -> bytes
    table = _read(Path("/proc/self/net/dev")) or ""
    for line in table.splitlines()[_HEADER_LINES:]:
        name, _, rest = line.partition(":")
        fields = rest.split()
        carried[name.strip()] = int(fields[_RECEIVED_BYTES]) + int(fields[_SENT_BYTES])
    for port in node.ports:
        if port.interface not in carried:
            continue
        for hca in port.hcas:  # RDMA devices of the port
            for counter in ("port_xmit_data", "port_rcv_data"):
                units = int(_read(_hca_folder(hca) / "counters" / counter) or 0)
                carried[port.interface] += _BYTES_PER_DATA_UNIT * units
    return carried


def describe_port(node: Node, port: Port) -> str:
    """Return a port in words, such as "NIC roce0 (mlx5_0:1) of node b1 (fabric b, 10.101.0.4)"."""
    address = f", {port.address}" if port.address else ""
    return f"NIC {port.name} of node {node.name} (fabric {port.fabric}{address})"


class _Target(NamedTuple):
    """Neighbouring node to test, and the fabric (network) to use."""

    node: str
    fabric: str


def unreachable(current: Session) -> list[str]:
    """Try to connect to the neighbouring nodes, and describe those that do not answer, in words.

    Neighbours are the nodes of the previous and the next rank in each process group of this rank.
    Each is tried by TCP over the network of that group, and over Ethernet. A refused connection is
    an answer, too. All are tried at the same time, for about PROBE_S seconds.

    Returns:
        For each silent node, e.g. "node b1 does not answer on roce0 10.1.0.4 (from roce0 10.1.0.3)
        within 3 s, but does over eth0".
    """
    port_of = _neighbour_ports(current)  # (node, fabric) -> the node's port on the fabric
    if not port_of:
        return []
    sources = [current.node.port(target.fabric).address for target in port_of]
    addresses = [port.address for port in port_of.values()]
    with ThreadPoolExecutor(len(port_of)) as pool:
        # (node, fabric) -> whether the node answers.
        answers = dict(zip(port_of, pool.map(answers_at, sources, addresses)))

    clauses = []
    for node in dict.fromkeys(target.node for target in port_of):
        targets = [target for target in port_of if target.node == node]
        silent = [target for target in targets if not answers[target]]
        answering = [target for target in targets if answers[target]]
        if not silent:
            continue
        # Name the ports that do not answer, and the ports of the node that do, if any.
        silent_ports = [port_of[target] for target in silent]
        silent_text = " and ".join(f"{port.name} {port.address}" for port in silent_ports)
        if answering:
            answering_text = " and ".join(port_of[target].name for target in answering)
            consequence = f"but does over {answering_text}"
        else:
            consequence = "over no NIC: the node is lost"
        # To keep the clause short, only the first of this node's NICs is named.
        source = current.node.port(silent[0].fabric)
        clauses.append(
            f"node {node} does not answer on {silent_text} (from {source.name} {source.address}) within "
            f"{PROBE_S:g} s, {consequence}"
        )
    return clauses


def _neighbour_ports(current: Session) -> dict[_Target, Port]:
    """Return the NIC ports of neighbouring nodes that unreachable() tries to connect to.

    Neighbours are the previous and the next rank in each process group of this rank. A neighbour is tried
    over the fabric of the group, and over Ethernet. If there are more than _MOST_PROBES ports, only those of
    the first groups are returned.

    Returns:
        (node, fabric) -> the node's port on the fabric.
    """
    port_of: dict[_Target, Port] = {}
    for record in current.groups:
        fabric = record.transport.fabric
        if fabric not in current.node.fabrics or current.rank not in record.ranks:
            continue  # a group inside the node, or without this rank
        position = record.ranks.index(current.rank)
        previous_rank = record.ranks[position - 1]
        next_rank = record.ranks[(position + 1) % len(record.ranks)]
        for rank in (previous_rank, next_rank):
            node = current.plan.node_of(rank)
            if node == current.node.name:
                continue
            for name in (fabric, ETHERNET):
                port_of.setdefault(_Target(node, name), current.site.node_by_name[node].port(name))
    return dict(list(port_of.items())[:_MOST_PROBES])


def answers_at(
    source: str, target: str, port: int = _PROBED_PORT, seconds: float = PROBE_S
) -> bool:
    """Return whether the kernel at `target` answers a connection attempt from `source`.

    Args:
        source: IP address of this node.
        target: IP address of the other node.
        port: TCP port of the other node.
        seconds: Seconds to wait for the answer.

    Returns:
        True if the port accepts or refuses the connection: both show that the kernel is reached. Also True
        if an address is empty, because nothing is known then.
    """
    if not source or not target:
        return True
    try:
        connection = socket.create_connection(
            (target, port), timeout=seconds, source_address=(source, 0)
        )
    except ConnectionRefusedError:
        return True
    except OSError:  # no answer, or no route
        return False
    connection.close()
    return True
