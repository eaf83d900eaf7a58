"""This node's NICs while the job runs: link, counters, and whether a neighbour still answers.

The kernel is asked, not the framework: the flags of the net device (of this process's network namespace), the
state of the HCA port, and whether the other end answers a connection attempt (a refusal is an answer).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from holmes_ext.cluster.fabric import ETHERNET

if TYPE_CHECKING:
    from holmes_ext.cluster.site import Node, Port
    from holmes_ext.runtime.session import Session

_SIOCGIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8913, 0x1, 0x40
PROBE_S = 3.0
_PROBED_PORT = 9  # discard: nearly always closed, so that the kernel at the other end refuses
_MOST_PROBES = 8
#: What tells of a bad link, where it grows: under class/net/DEVICE and under class/infiniband/HCA/ports/N.
_NET_COUNTERS = (
    "carrier_down_count",
    "statistics/rx_errors",
    "statistics/tx_errors",
    "statistics/tx_carrier_errors",
    "statistics/rx_dropped",
    "statistics/tx_dropped",
)
_HCA_COUNTERS = (
    "counters/link_downed",
    "counters/link_error_recovery",
    "counters/symbol_error",
    "counters/port_rcv_errors",
    "counters/port_xmit_discards",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/packet_seq_err",
)
#: Of each port by its name, as the job started: what they show beyond that belongs to it.
_at_start: dict[str, dict[str, int]] = {}


def in_use(current: Session) -> list[Port]:
    """The ports of this node that its groups travel on; all usable ones while there are no groups yet."""
    fabrics = {record.transport.fabric for record in current.groups}
    ports = [port for port in current.node.ports if port.usable]
    return [
        port for port in ports if not fabrics or port.fabric in fabrics or port.fabric == ETHERNET
    ]


def trouble(port: Port) -> str:
    """Why the port carries nothing now ("has no link"), or ""."""
    if port.interface and (problem := _interface_trouble(port.interface)):
        return problem
    for hca in port.hcas:
        state = _read(_folder(hca) / "state")
        if state is not None and "ACTIVE" not in state:
            return f"has its port {hca} in state {state}"
    return ""


def _interface_trouble(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(
                any_socket, _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode()[:15], 0)
            )
        except OSError as error:
            return f"is gone ({error.strerror})"
    flags = struct.unpack("16sH14x", answer)[1]
    return (
        "is set down" if not flags & _IFF_UP else "has no link" if not flags & _IFF_RUNNING else ""
    )


def _folder(hca: str) -> Path:
    device, _, number = hca.partition(":")
    return (
        Path(os.environ.get("HOLMES_SYSFS") or "/sys")
        / "class/infiniband"
        / device
        / "ports"
        / (number or "1")
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return None


def counters(ports: list[Port]) -> dict[str, dict[str, int]]:
    """Error counters of every port, by its name, as far as kernel and driver have them."""
    by_port: dict[str, dict[str, int]] = {}
    for port in ports:
        values = by_port.setdefault(port.name, {})
        places = (
            [(Path("/sys/class/net") / port.interface, _NET_COUNTERS)] if port.interface else []
        )
        for place, names in [*places, *((_folder(hca), _HCA_COUNTERS) for hca in port.hcas)]:
            for name in names:
                text = _read(place / name)
                if text is not None and text.isdecimal():
                    key = name.rpartition("/")[2]
                    values[key] = values.get(key, 0) + int(text)
    return by_port


def remember_counters(current: Session) -> None:
    """Call as the job starts."""
    _at_start.update(counters([port for port in current.node.ports if port.usable]))


def grown(now: dict[str, dict[str, int]], port: Port) -> str:
    """ "carrier_down_count +1, tx_errors +3" of a port since the start, or ""."""
    old = _at_start.get(port.name, {})
    grew = {key: value - old.get(key, value) for key, value in now.get(port.name, {}).items()}
    return ", ".join(f"{key} +{value}" for key, value in grew.items() if value > 0)


def bytes_carried(node: Node) -> dict[str, int]:
    """Interface of this node -> bytes received and sent, by its HCAs if it has some (sockets miss those)."""
    carried: dict[str, int] = {}
    for line in (_read(Path("/proc/self/net/dev")) or "").splitlines()[2:]:
        name, _, rest = line.partition(":")
        fields = rest.split()
        carried[name.strip()] = int(fields[0]) + int(fields[8])
    for port in node.ports:
        for hca in port.hcas if port.interface in carried else ():
            for counter in ("port_xmit_data", "port_rcv_data"):  # in units of four bytes
                carried[port.interface] += 4 * int(_read(_folder(hca) / "counters" / counter) or 0)
    return carried


def say(node: Node, port: Port) -> str:
    """ "NIC roce0 (mlx5_0:1) of node b1 (fabric b, 10.101.0.4)"."""
    return (
        f"NIC {port.name} of node {node.name} (fabric "
        f"{port.fabric}{f', {port.address}' if port.address else ''})"
    )


def unreachable(current: Session) -> list[str]:
    """Neighbours that do not answer over their group's NIC, half a sentence each; in about PROBE_S
    seconds."""
    todo: dict[tuple[str, str], Port] = {}  # (node, fabric) -> its port
    for record in current.groups:
        if record.transport.fabric not in current.node.fabrics or current.rank not in record.ranks:
            continue
        place = record.ranks.index(current.rank)
        for rank in (record.ranks[place - 1], record.ranks[(place + 1) % len(record.ranks)]):
            name = current.plan.node_of(rank)
            for fabric in (record.transport.fabric, ETHERNET) if name != current.node.name else ():
                todo.setdefault((name, fabric), current.site.node_by_name[name].port(fabric))
    todo = dict(list(todo.items())[:_MOST_PROBES])
    if not todo:
        return []
    sources = [current.node.port(fabric).address for _, fabric in todo]
    with ThreadPoolExecutor(len(todo)) as pool:
        answers = dict(
            zip(todo, pool.map(answers_at, sources, [port.address for port in todo.values()]))
        )
    lines = []
    for name in dict.fromkeys(name for name, _ in todo):
        silent = [fabric for node, fabric in todo if node == name and not answers[node, fabric]]
        alive = [fabric for node, fabric in todo if node == name and answers[node, fabric]]
        if silent:
            dead = " and ".join(
                f"{todo[name, fabric].name} {todo[name, fabric].address}" for fabric in silent
            )
            over = " and ".join(todo[name, fabric].name for fabric in alive)
            rest = f"but does over {over}" if alive else "over no NIC: the node is lost"
            mine = current.node.port(silent[0])
            source = f"(from {mine.name} {mine.address}) within {PROBE_S:g} s"
            lines.append(f"node {name} does not answer on {dead} {source}, {rest}")
    return lines


def answers_at(
    source: str, target: str, port: int = _PROBED_PORT, seconds: float = PROBE_S
) -> bool:
    """Whether the kernel at `target` answers a connection from `source`; True where one has no address."""
    if not source or not target:
        return True
    try:
        socket.create_connection(
            (target, port), timeout=seconds, source_address=(source, 0)
        ).close()
        return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
