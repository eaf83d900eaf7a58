"""What NCCL_DEBUG=INFO says: which network each communicator of a process uses, on which devices.

NCCL 2.18 to 2.30 write, a line each, to stdout (src/debug.cc):

    HOST:PID:TID [DEV] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
    HOST:PID:TID [DEV] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
    HOST:PID:TID [DEV] NCCL INFO Using network IB                                    one for each communicator
    HOST:PID:TID [DEV] NCCL INFO ncclCommInitRankConfig comm 0x.. rank 0 nranks 4 .. - Init START
                                                                                     (2.18: comm 0x.. ..)
    HOST:PID:TID [DEV] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
                                                                                     as its ranks connect
    HOST:PID:TID [DEV] FILE:LINE NCCL WARN ...

"Using network" and "Init START" of a communicator come from one thread, in this order. Channels do not say
whose they are: they count for the communicator that was begun last, so a process should use its groups one
after the other.
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
    """rank of `ranks`; network: "IB", "Socket" or a plugin's; split: made by ncclCommSplit; devices: what its
    channels use ("mlx5_0:1/IB", "eth0"), "" where no line named the device; gdr: whether one of them is
    GPUDirect RDMA.
    """

    network: str
    rank: int = -1
    ranks: int = 0
    split: bool = False
    devices: set[str] = field(default_factory=set)
    gdr: bool = False


@dataclass
class Said:
    """Of one process: its communicators in the order of their making, devices of each network, warnings."""

    communicators: list[Communicator]
    devices: dict[str, list[str]]
    warnings: list[str]


def read(output: str) -> Said:
    """All that one process wrote; lines that are not NCCL's are passed over."""
    said, asked = (
        Said([], {}, []),
        {},
    )  # asked: thread -> the network of the communicator that it is making
    for line in output.splitlines():
        match = _LINE.search(line)
        if match is None:
            continue
        text, thread = match["text"], match["where"]
        if match["level"] == "WARN":
            said.warnings.append(text)
        elif text.startswith("Using network "):
            asked[thread] = text.removeprefix("Using network ").strip()
        elif begin := _BEGIN.match(text):
            split = "split" in (begin["call"] or "").lower()
            made = Communicator(
                asked.pop(thread, ""), int(begin["rank"]), int(begin["ranks"]), split
            )
            said.communicators.append(made)
        elif devices := _DEVICES.match(text):
            said.devices[devices["network"]] = [
                name for _, name in _DEVICE.findall(devices["devices"])
            ]
        elif (channel := _CHANNEL.match(text)) and said.communicators:
            last, number = said.communicators[-1], int(channel["device"])
            known = said.devices.get(channel["network"], [])
            last.devices.add(known[number] if number < len(known) else "")
            last.gdr |= bool(channel["gdr"])
    return said
