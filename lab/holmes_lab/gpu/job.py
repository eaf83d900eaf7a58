"""The environment of the ranks of a job on emulated GPUs.

    LD_PRELOAD    the runtime and NCCL: before torch's own, which a path inside torch finds
    PYTHONPATH    what loads the operators when a program imports torch (holmes_lab/site)
    HOLMES_GPU_*  how many GPUs a node has, their memory, their clock; where the ranks tell what they do
    NCCL_*        what a person would set on such a cluster; what the user has set stays

A stock job over several fabrics gets the Ethernet, as its user would give it (NCCL_IB_DISABLE=1): InfiniBand
and RoCE cannot talk to each other. With --holmes, holmes chooses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.document import parse_json
from holmes_ext.errors import HolmesError
from holmes_lab.emulate.accelerator import SITE
from holmes_lab.gpu.libraries import NCCL_SETTINGS, Libraries
from holmes_lab.gpu.operators import VARIABLE as OPERATORS
from holmes_lab.network.shaping import LabNode

#: Directory in which the ranks tell what they do (csrc/runtime/watch.cc, csrc/nccl/communicators.cc).
WATCH = "HOLMES_GPU_WATCH"
#: What a Python that is preloaded needs before its ranks are forked. (The rest is each rank's own.)
OF_TEMPLATE = ("HOLMES_GPU_COUNT", OPERATORS)
#: Memory of this machine without which a rank cannot even start, MB.
LEAST_RANK_MB = 500


@dataclass(frozen=True)
class GpuClock:
    """--accelerator for an emulated GPU. flops: FLOP/s; bytes: of its memory in a second; sms:
    multiprocessors; speed: cluster -> factor on flops and bytes. 0: what the host takes."""

    flops: float = 0.0
    bytes: float = 0.0
    sms: int = 108
    speed: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in (("flops", self.flops), ("bytes", self.bytes)):
            if not 0 <= value < 1e18:
                raise HolmesError(f"key {key!r}: {value} is not a rate a second")
        if not 1 <= self.sms <= 1024:
            raise HolmesError(f"key 'sms': {self.sms} multiprocessors; it must be 1 to 1024")
        for name, factor in self.speed.items():
            if not 0 < factor < 1e6:
                raise HolmesError(f"key 'speed.{name}': {factor} is not a factor above 0")

    def variables(self, cluster: str) -> dict[str, str]:
        factor = self.speed.get(cluster, 1.0)
        rates = {
            "HOLMES_GPU_MFLOPS": self.flops * factor / 1e6,
            "HOLMES_GPU_MBYTES": self.bytes * factor / 1e6,
        }
        return {
            "HOLMES_GPU_SMS": str(self.sms),
            **{name: str(round(value)) for name, value in rates.items() if value},
        }


def parse_clock(text: str) -> GpuClock:
    """`text` of --accelerator; HolmesError names the key."""
    advice = 'write for example {"flops": 5e9, "bytes": 2e9, "sms": 108}'
    return parse_json(text, "--accelerator", advice).into(GpuClock)


@dataclass(frozen=True)
class Gpus:
    """The emulated GPUs of a job. count: of each node, None: one for each process; memory_mb: of each; seed:
    kernels start late at random (--gpu-order random), None: not."""

    libraries: Libraries
    count: int | None = None
    memory_mb: int = 16384
    seed: int | None = None
    clock: GpuClock = GpuClock()

    def check(self, processes: int, ranks: int, environ: Mapping[str, str]) -> int:
        """GPUs of each node. HolmesError where its processes would find too few, or this machine has too
        little memory for the ranks."""
        count = processes if self.count is None else self.count
        if count < processes:
            raise HolmesError(
                f"--gpu {count}: the {processes} processes of a node need a GPU each (--processes)"
            )
        shown = visible(environ.get("CUDA_VISIBLE_DEVICES"), count)
        if shown < processes:
            raise HolmesError(
                f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']} hides emulated GPUs: it shows"
                f" {shown} to the {processes} processes of a node; unset it"
            )
        if ranks * LEAST_RANK_MB > (left := memory_left_mb()):
            raise HolmesError(
                f"--gpu: {ranks} ranks need at least {ranks * LEAST_RANK_MB} MB of memory, and this"
                f" machine has {left} MB left; run fewer (--order, --processes)"
            )
        return count

    def environment(
        self,
        base: Mapping[str, str],
        count: int,
        nodes: Sequence[LabNode],
        holmes: bool,
        watch: Path,
    ) -> dict[str, str]:
        """What is added to the environment `base` of all ranks."""
        stock = {} if holmes else of_stock(nodes)
        nccl = {**NCCL_SETTINGS, "NCCL_NET_PLUGIN": str(self.libraries.plugin), **stock}
        random = (
            {}
            if self.seed is None
            else {"HOLMES_GPU_RANDOM": "1", "HOLMES_GPU_SEED": str(self.seed)}
        )
        preload = " ".join(map(str, self.libraries.preload))
        return {
            **{name: value for name, value in nccl.items() if name not in base},
            **random,
            "LD_PRELOAD": " ".join(filter(None, [preload, base.get("LD_PRELOAD", "")])),
            "PYTHONPATH": os.pathsep.join(filter(None, [SITE, base.get("PYTHONPATH", "")])),
            OPERATORS: str(self.libraries.hook),
            WATCH: str(watch),
            "HOLMES_GPU_COUNT": str(count),
            "HOLMES_GPU_MEMORY_MB": str(self.memory_mb),
        }


def of_stock(nodes: Sequence[LabNode]) -> dict[str, str]:
    """What a person would tell NCCL about these nodes without holmes."""
    fabrics = {nic.fabric for node in nodes for nic in node.nics}
    rdma = len(fabrics - {ETHERNET}) == 1 and all(len(node.nics) > 1 for node in nodes)
    return {"NCCL_SOCKET_IFNAME": "eth0", **({} if rdma else {"NCCL_IB_DISABLE": "1"})}


def visible(text: str | None, count: int) -> int:
    """How many of `count` GPUs CUDA_VISIBLE_DEVICES shows: those before the first that does not exist."""
    if text is None:
        return count
    shown = 0
    for item in text.split(","):
        if not item.strip().isdecimal() or int(item) >= count:
            break
        shown += 1
    return shown


def memory_left_mb() -> int:
    """Of this machine, by the kernel's estimate."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) // 1024
