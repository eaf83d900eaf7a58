"""Which backend the tests' jobs train over.

    HOLMES_TEST_CARRIER=gloo    gloo, on the CPU: what `make test` runs
    HOLMES_TEST_CARRIER=nccl    the same functions and scripts on emulated GPUs, over NCCL's own host code,
                                with the CUDA build of torch: what `make gpu` runs
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.lab.gpu import nccl_source
from holmes_ext.lab.gpu.build import cache_folder
from holmes_ext.lab.gpu.job import Gpus
from holmes_ext.lab.gpu.libraries import libraries

CARRIER = os.environ.get("HOLMES_TEST_CARRIER", "gloo")
if CARRIER not in ("gloo", "nccl"):
    raise ValueError(f"HOLMES_TEST_CARRIER={CARRIER}: gloo or nccl")
ON_GPUS = CARRIER == "nccl"
DEVICE = "cuda" if ON_GPUS else "cpu"
#: NCCL 2.29 takes 512 MB for a communicator of one rank (64 channels for messages, buffers of 4 MB): this
#: machine's memory, which a process has back when it ends. So it is some 180 MB for a rank of a communicator.
LESS_MEMORY = {"NCCL_MAX_P2P_NCHANNELS": "4", "NCCL_BUFFSIZE": str(1 << 18)}
#: Of what is gloo's or the CPU's own, and of what NCCL alone has.
gloo_only = pytest.mark.skipif(ON_GPUS, reason="gloo's or the CPU's own")
gpu_only = pytest.mark.skipif(not ON_GPUS, reason="HOLMES_TEST_CARRIER=nccl")


@functools.cache
def gpus() -> Gpus:
    """Emulated ones for this Python's torch; skips the test where NCCL's source cannot be had."""
    if not os.environ.get(nccl_source.VARIABLE):
        try:
            nccl_source.find_nccl(None, cache_folder())
        except HolmesError as error:
            pytest.skip(str(error))
    return Gpus(libraries([sys.executable], os.environ))


@functools.cache
def watched() -> Path:
    """Where ranks that no lab started tell what they do."""
    directory = tempfile.mkdtemp(prefix="holmes-gpu-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def environment(count: int = 1) -> dict[str, str]:
    """Of ranks that no lab starts, each of which finds `count` emulated GPUs; {} on the CPU. Their network is
    the loopback device, by sockets."""
    if not ON_GPUS:
        return {}
    added = gpus().environment(os.environ, count, (), holmes=True, watch=watched())
    return {**added, **LESS_MEMORY, "NCCL_NET_PLUGIN": "none", "NCCL_SOCKET_IFNAME": "lo",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
