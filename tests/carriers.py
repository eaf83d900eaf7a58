"""Selects the backend over which the jobs of the tests train.

HOLMES_TEST_CARRIER=gloo    gloo, on the CPU: `make test`
HOLMES_TEST_CARRIER=nccl    NCCL's own host code on emulated GPUs, with the CUDA build of torch: `make gpu`
HOLMES_TEST_CARRIER=cuda    NCCL on one physical GPU that all ranks share, each a host of its own to NCCL:
                            `make physical`. Its RDMA is the lab's network plugin, which `holmes lab build`
                            made, or HOLMES_TEST_NET_PLUGIN names
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from holmes_lab.gpu import nccl_source
from holmes_lab.gpu.cache import cache_folder
from holmes_lab.gpu.job import GpuClock, Gpus, stock_nccl_settings
from holmes_lab.gpu.libraries import advised_nccl, libraries
from holmes_lab.gpu.torch_build import find_torch
from holmes_lab.network.shaping import LabNode

from holmes_ext.cluster.nccl import LAB_PLUGIN
from holmes_ext.errors import HolmesError

CARRIER = os.environ.get("HOLMES_TEST_CARRIER", "gloo")
if CARRIER not in ("gloo", "nccl", "cuda"):
    raise ValueError(f"HOLMES_TEST_CARRIER={CARRIER}: gloo, nccl or cuda")
ON_GPUS = CARRIER != "gloo"
EMULATED, PHYSICAL = CARRIER == "nccl", CARRIER == "cuda"
BACKEND = "nccl" if ON_GPUS else "gloo"
DEVICE = "cuda" if ON_GPUS else "cpu"
#: NCCL 2.29 takes 512 MB for a communicator of one rank (64 channels for messages, buffers of 4 MB). With
#: these settings it is some 50 MB of this machine's memory for a rank of a communicator on emulated GPUs.
LESS_MEMORY = {"NCCL_MAX_P2P_NCHANNELS": "4", "NCCL_BUFFSIZE": str(1 << 18)} if not PHYSICAL else {}
#: No rank may begin to use the GPU before it is forked.
NO_CUDA_YET = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: Marks of tests for what only gloo or the CPU has, and for what only NCCL has.
gloo_only = pytest.mark.skipif(ON_GPUS, reason="runs over gloo alone: make test")
gpu_only = pytest.mark.skipif(not ON_GPUS, reason="runs over NCCL alone: make gpu")


@dataclass(frozen=True)
class PhysicalGpu:
    """One physical GPU that all ranks of a job on emulated nodes share.

    It has the interface of Gpus, which stands for emulated GPUs.
    """

    plugin: str  # path of the network plugin that NCCL uses as "IB"
    clock = GpuClock()

    def check(self, processes: int, ranks: int, environ: Mapping[str, str]) -> int:
        if processes > 1:
            pytest.skip("a node of several processes has a GPU for each: here is one")
        return 1

    def environment(
        self,
        given: Mapping[str, str],
        count: int,
        nodes: Sequence[LabNode],
        holmes: bool,
        watch: Path,
    ) -> dict[str, str]:
        stock = {} if holmes else stock_nccl_settings(nodes)
        # NCCL 2.28 frees twice what it has for a plugin without devices, if its own "IB" has none either
        added = {"NCCL_NET_PLUGIN": self.plugin, **NO_CUDA_YET, **stock, **given}
        if added.get("NCCL_IB_DISABLE") == "1":
            added["NCCL_NET_PLUGIN"] = "none"
        return added


@functools.cache
def gpus() -> Gpus | PhysicalGpu:
    """Return the GPUs of the tests: emulated ones, or the physical one.

    The test is skipped if the source of NCCL or the network plugin is missing.
    """
    if PHYSICAL:
        # The file of NCCL's network plugin: the one that the variable names, else the one built last.
        built_plugins = cache_folder().glob(f"nccl-*/{LAB_PLUGIN}")
        newest_plugin = max(built_plugins, key=os.path.getmtime, default="")
        plugin = os.environ.get("HOLMES_TEST_NET_PLUGIN") or str(newest_plugin)
        if not plugin:
            pytest.skip("no network plugin: make gpu-libraries")
        return PhysicalGpu(plugin)
    skip_without_nccl_source()
    return Gpus(libraries([sys.executable], os.environ))


def skip_without_nccl_source() -> None:
    """Skip the test if no source of NCCL is found. Emulated GPUs need a library that is compiled from it.

    If the environment variable HOLMES_NCCL_SOURCE is set, the test is not skipped. Where it names no source,
    the build fails with a message.
    """
    if os.environ.get(nccl_source.VARIABLE):  # "HOLMES_NCCL_SOURCE"
        return
    torch_build = find_torch(sys.executable, os.environ)
    try:
        nccl_source.find_nccl(None, cache_folder(), advised_nccl(torch_build))
    except HolmesError as error:
        pytest.skip(str(error))


@functools.cache
def watched() -> Path:
    """Return a folder in which emulated GPUs of ranks without a lab record what they execute."""
    directory = tempfile.mkdtemp(prefix="holmes-gpu-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def environment(count: int = 1) -> dict[str, str]:
    """Return environment variables for ranks that no lab starts; {} on the CPU.

    Each rank finds `count` emulated GPUs, and uses sockets on the loopback device.
    """
    if not ON_GPUS:
        return {}
    added = (
        gpus().environment(os.environ, count, (), holmes=True, watch=watched()) if EMULATED else {}
    )
    return {
        **added,
        **LESS_MEMORY,
        **NO_CUDA_YET,
        "NCCL_NET_PLUGIN": "none",
        "NCCL_SOCKET_IFNAME": "lo",
    }
