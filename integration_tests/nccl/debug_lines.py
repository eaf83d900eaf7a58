"""Reads the output of NCCL_DEBUG=INFO: the network and the devices of each communicator.

NCCL 2.18 to 2.30 write, a line each, to stdout (src/debug.cc):

    HOST:PID:TID [DEV] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
    HOST:PID:TID [DEV] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
    HOST:PID:TID [DEV] NCCL INFO Using network IB                                    one for each communicator
    HOST:PID:TID [DEV] NCCL INFO ncclCommInitRankConfig comm 0x.. rank 0 nranks 4 .. - Init START
                                                                                     (2.18: comm 0x.. ..)
    HOST:PID:TID [DEV] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
                                                                                     as its ranks connect
    HOST:PID:TID [DEV] FILE:LINE NCCL WARN ...

"Using network" and "Init START" of a communicator come from one thread, in this order. A line about a
channel does not name its communicator. It is counted for the communicator that was begun last, so a process
should use its groups one after the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LINE = re.compile(
    r"(?P<where>\S+:\d+:\d+) \[\d+\] (?:\S+:\d+ )?NCCL (?P<level>INFO|WARN) (?P<text>.*)"
)
_BEGIN = re.compile(
    r"(?:\[Rank \d+\] )?(?:(?P<call>nccl\w+) )?comm (?P<comm>0x[0-9a-f]+|\(nil\)) rank (?P<rank>\d+)"
    r" nranks (?P<ranks>\d+) .*- ?Init START"
)
_DEVICES = re.compile(r"NET/(?P<network>.+?) ?: Using (?P<devices>\[0\].*)")
_DEVICE = re.compile(r"\[(\d+)\](\S+?)(?=:(?:[\[\d.a-fA-F:%\w]*<\d+>)|\s|;|$)")
_CHANNEL = re.compile(
    r"Channel \d+/\d+ : \d+\[\w+\] -> \d+\[\w+\] \[(?:send|receive)\] via NET/(?P<network>.+?)/"
    r"(?P<device>\d+)(?:\(\d+\))?(?P<gdr>/GDRDMA)?"
)


@dataclass
class Communicator:
    """A communicator, as NCCL describes it in one process."""

    network: str  # "IB", "Socket" or a plugin's name
    rank: int = -1  # of this process
    ranks: int = 0  # number of ranks
    split: bool = False  # made by ncclCommSplit
    #: Devices of the channels, such as "mlx5_0:1/IB" or "eth0"; "" if no line names the device.
    devices: set[str] = field(default_factory=set)
    gdr: bool = False  # a channel uses GPUDirect RDMA


@dataclass
class Said:
    """The facts that NCCL printed in one process."""

    communicators: list[Communicator]  # in the order in which they were made
    devices: dict[str, list[str]]  # by network
    warnings: list[str]


def read(output: str) -> Said:
    """Return the facts in the output of one process; lines that are not NCCL's are skipped."""
    said = Said(communicators=[], devices={}, warnings=[])
    network_of_thread: dict[str, str] = {}  # network of the communicator that a thread is making
    for line in output.splitlines():
        match = _LINE.search(line)
        if match is None:
            continue
        text = match["text"]
        thread = match["where"]
        if match["level"] == "WARN":
            said.warnings.append(text)
        elif text.startswith("Using network "):
            network_of_thread[thread] = text.removeprefix("Using network ").strip()
        elif begin := _BEGIN.match(text):
            communicator = Communicator(
                network=network_of_thread.pop(thread, ""),
                rank=int(begin["rank"]),
                ranks=int(begin["ranks"]),
                split="split" in (begin["call"] or "").lower(),
            )
            said.communicators.append(communicator)
        elif devices := _DEVICES.match(text):
            said.devices[devices["network"]] = [
                name for _, name in _DEVICE.findall(devices["devices"])
            ]
        elif (channel := _CHANNEL.match(text)) and said.communicators:
            communicator = said.communicators[-1]
            number = int(channel["device"])
            names = said.devices.get(channel["network"], [])
            communicator.devices.add(names[number] if number < len(names) else "")
            communicator.gdr |= bool(channel["gdr"])
    return said
