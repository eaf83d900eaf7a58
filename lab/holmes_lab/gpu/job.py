"""Sets up the environment of a job's ranks on emulated GPUs.

    variable        purpose
    LD_PRELOAD      loads the emulated CUDA libraries and NCCL instead of those that torch would find
    PYTHONPATH      installs the emulated operators when a program imports torch (holmes_lab/site)
    HOLMES_GPU_*    number of GPUs of a node, their memory and clock, and the directory of watch files
    NCCL_*          settings that suit such a cluster; settings of the user have precedence

Without --holmes, a job over several fast networks uses Ethernet (NCCL_IB_DISABLE=1), as InfiniBand and RoCE
cannot reach each other. With --holmes, holmes chooses the network of each group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.document import parse_json
from holmes_ext.errors import HolmesError
from holmes_lab.emulate.accelerator import SITECUSTOMIZE_FOLDER
from holmes_lab.emulate.accelerator import VARIABLE as ACCELERATOR_VARIABLE
from holmes_lab.gpu.libraries import NCCL_SETTINGS, Libraries
from holmes_lab.gpu.operators import VARIABLE as OPERATORS_VARIABLE
from holmes_lab.network.shaping import LabNode

#: Environment variable with the directory for the watch files of the ranks
#: (csrc/runtime/watch.cc, csrc/nccl/communicators.cc).
WATCH_VARIABLE = "HOLMES_GPU_WATCH"
#: Environment variable with the number of emulated GPUs of a node. Only jobs on emulated GPUs have
#: it.
GPU_COUNT_VARIABLE = "HOLMES_GPU_COUNT"
#: Variables of emulated GPUs that a preloaded Python needs before ranks are forked from it. The
#: other HOLMES_GPU_* variables are set in each rank.
_PRELOAD_VARIABLES = (GPU_COUNT_VARIABLE, OPERATORS_VARIABLE)
#: Memory in MB that a rank needs at least.
LEAST_RANK_MB = 500
#: Beginnings of the names of variables that are read by the script of a rank, not by imports.
_READ_BY_SCRIPTS = ("HOLMES", "GLOO_", "NCCL_", "CUDA_DEVICE_MAX", "CUDA_LAUNCH_")
# Limits of the settings of an emulated clock.
_MAX_RATE = 1e18  # FLOP/s or bytes/s
_MAX_SMS = 1024
_MAX_SPEED = 1e6


@dataclass(frozen=True)
class GpuClock:
    """Emulated speed of a GPU (--accelerator). A rate of 0 stands for the speed of this machine."""

    flops: float = 0.0  # FLOP/s
    bytes: float = 0.0  # bytes/s of the GPU's memory
    sms: int = 108  # multiprocessors
    speed: dict[str, float] = field(default_factory=dict)  # cluster -> factor on both rates

    def __post_init__(self) -> None:
        for key, rate in (("flops", self.flops), ("bytes", self.bytes)):
            if not 0 <= rate < _MAX_RATE:
                raise HolmesError(f"key {key!r}: {rate} is not a rate a second")
        if not 1 <= self.sms <= _MAX_SMS:
            raise HolmesError(f"key 'sms': {self.sms} multiprocessors; it must be 1 to {_MAX_SMS}")
        for name, factor in self.speed.items():
            if not 0 < factor < _MAX_SPEED:
                raise HolmesError(f"key 'speed.{name}': {factor} is not a factor above 0")

    def variables(self, cluster: str) -> dict[str, str]:
        """Return the environment variables that set the speed of the GPUs in a cluster."""
        factor = self.speed.get(cluster, 1.0)
        variables = {"HOLMES_GPU_SMS": str(self.sms)}
        if self.flops:
            variables["HOLMES_GPU_MFLOPS"] = str(round(self.flops * factor / 1e6))
        if self.bytes:
            variables["HOLMES_GPU_MBYTES"] = str(round(self.bytes * factor / 1e6))
        return variables


def parse_clock(text: str) -> GpuClock:
    """Return the clock that the JSON text of --accelerator describes.

    Raises:
        HolmesError: The text is no JSON, or a key is unknown or has a wrong value.
    """
    advice = 'write for example {"flops": 5e9, "bytes": 2e9, "sms": 108}'
    return parse_json(text, "--accelerator", advice).into(GpuClock)


@dataclass(frozen=True)
class Gpus:
    """Number, memory and speed of the emulated GPUs of a job."""

    libraries: Libraries
    count: int | None = None  # GPUs of each node; None: one for each process
    memory_mb: int = 16384  # memory of each GPU
    #: Seed of random delays before kernels (--gpu-order random); None: without delays.
    seed: int | None = None
    clock: GpuClock = GpuClock()

    def check(self, processes: int, ranks: int, environ: Mapping[str, str]) -> int:
        """Return the number of GPUs of each node, after a check that a job can run on them.

        Args:
            processes: Processes of each node, or of the one with most.
            ranks: Ranks of the job.
            environ: Environment of the ranks.

        Raises:
            HolmesError: A process would find no GPU, or this machine has too little memory for the ranks.
        """
        count = processes if self.count is None else self.count
        if count < processes:
            raise HolmesError(
                f"--gpu {count}: the {processes} processes of a node need a GPU each (--processes)"
            )
        visible_count = visible(environ.get("CUDA_VISIBLE_DEVICES"), count)
        if visible_count < processes:
            raise HolmesError(
                f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']} hides emulated GPUs: it shows"
                f" {visible_count} to the {processes} processes of a node; unset it"
            )
        needed_mb = ranks * LEAST_RANK_MB
        available_mb = memory_left_mb()
        if needed_mb > available_mb:
            raise HolmesError(
                f"--gpu: {ranks} ranks need at least {needed_mb} MB of memory, and this"
                f" machine has {available_mb} MB left; run fewer (--order, --processes)"
            )
        return count

    def variables_of_node(self, cluster: str, processes: int) -> dict[str, str]:
        """Return the environment variables that differ between the nodes of a job.

        They set the number of the node's emulated GPUs, and their speed (it may depend on the cluster).

        Args:
            cluster: Cluster of the node.
            processes: Processes of the node.
        """
        variables = self.clock.variables(cluster)
        if self.count is None:  # --gpu names no number of GPUs: one for each process
            variables[GPU_COUNT_VARIABLE] = str(processes)
        return variables

    def environment(
        self,
        base: Mapping[str, str],
        count: int,
        nodes: Sequence[LabNode],
        holmes: bool,
        watch: Path,
    ) -> dict[str, str]:
        """Return the variables that are added to the environment of all ranks.

        Args:
            base: Environment of the ranks without emulated GPUs. Its settings of NCCL have precedence.
            count: GPUs of each node.
            nodes: Nodes of the job.
            holmes: Whether the job runs with holmes. holmes chooses the network of each NCCL communicator.
                False: NCCL's settings name a network, as a user without holmes would.
            watch: Directory for the watch files of the ranks. The lab reads their progress there.
        """
        nccl_settings = {**NCCL_SETTINGS, "NCCL_NET_PLUGIN": str(self.libraries.plugin)}
        if not holmes:
            nccl_settings.update(stock_nccl_settings(nodes))
        # The settings of the user have precedence.
        added = {name: value for name, value in nccl_settings.items() if name not in base}
        if self.seed is not None:
            added["HOLMES_GPU_RANDOM"] = (
                "1"  # random delays before kernels; SEED alone has no effect
            )
            added["HOLMES_GPU_SEED"] = str(self.seed)
        preloaded = [str(library) for library in self.libraries.preload]
        if base.get("LD_PRELOAD"):
            preloaded.append(base["LD_PRELOAD"])
        # With sitecustomize.py in it, each Python installs the emulation of CUDA when it starts.
        python_path = [SITECUSTOMIZE_FOLDER]
        if base.get("PYTHONPATH"):
            python_path.append(base["PYTHONPATH"])
        return {
            **added,
            "LD_PRELOAD": " ".join(preloaded),
            "PYTHONPATH": os.pathsep.join(python_path),
            OPERATORS_VARIABLE: str(self.libraries.operators_library),  # CPU kernels for torch
            WATCH_VARIABLE: str(watch),
            GPU_COUNT_VARIABLE: str(count),
            "HOLMES_GPU_MEMORY_MB": str(self.memory_mb),
        }


def preload_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Python that imports modules before ranks are forked from it.

    Variables that only the script of a rank reads, after the imports, are left out. Jobs that
    differ in nothing else then share one preloaded Python. Each rank gets its whole environment in
    any case.

    Args:
        env: Environment of the ranks.
    """
    read_by_imports = {
        name: value
        for name, value in env.items()
        if name in (ACCELERATOR_VARIABLE, *_PRELOAD_VARIABLES)
        or not name.startswith(_READ_BY_SCRIPTS)
    }
    if GPU_COUNT_VARIABLE in env:  # with emulated GPUs
        # Ranks are forked from this Python, and CUDA fails in a fork if its parent has used CUDA.
        # With this variable, torch asks NVML for the number of GPUs, and does not use CUDA.
        read_by_imports["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return read_by_imports


def stock_nccl_settings(nodes: Sequence[LabNode]) -> dict[str, str]:
    """Return the NCCL settings that a user without holmes would choose for these nodes.

    NCCL may use RDMA only if all nodes have NICs of the same fast network.
    """
    settings = {"NCCL_SOCKET_IFNAME": "eth0"}
    fast_fabrics = {nic.fabric for node in nodes for nic in node.nics} - {ETHERNET}
    all_have_fast_nic = all(len(node.nics) > 1 for node in nodes)  # the first NIC is Ethernet
    if len(fast_fabrics) != 1 or not all_have_fast_nic:
        settings["NCCL_IB_DISABLE"] = "1"
    return settings


def visible(text: str | None, count: int) -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES shows.

    As in CUDA, devices after the first invalid number are not visible.

    Args:
        text: Value of the variable; None if it is not set.
        count: GPUs of the node.
    """
    if text is None:
        return count
    visible_count = 0
    for item in text.split(","):
        if not item.strip().isdecimal() or int(item) >= count:
            break
        visible_count += 1
    return visible_count


def memory_left_mb() -> int:
    """Return the available memory of this machine in MB, as the kernel estimates it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available_kb = int(fields["MemAvailable"].split()[0])
    return available_kb // 1024
