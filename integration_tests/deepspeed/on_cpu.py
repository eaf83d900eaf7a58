"""Prepares DeepSpeed to train on CPUs in a test's processes, which stand for nodes with a GPU."""

import os

import deepspeed
import torch
from deepspeed.runtime.zero import stage_1_and_2
from packaging.version import Version

from holmes_ext.cluster.site import Site
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process


def prepare() -> None:
    """Initialize DeepSpeed on the CPU in this rank, instead of deepspeed.init_distributed()."""
    os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1", LOCAL_WORLD_SIZE="1")
    # Compiling this operation would take half a minute, and the tests do not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    accelerator = deepspeed.accelerator.get_accelerator()
    # torch supports fp16 on every CPU, but DeepSpeed requires AMX (or refuses always, in 0.16.7).
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float, torch.bfloat16, torch.float16]
    if accelerator.Stream is None:  # DeepSpeed 0.16's activation checkpointing makes a Stream
        type(accelerator).Stream = staticmethod(lambda device: None)
    # This function looks for tensors of type "torch.cpu.FloatTensor", which does not exist.
    if not stage_1_and_2.split_half_float_double([torch.zeros(1)]):
        stage_1_and_2.split_half_float_double = lambda tensors: [tensors]
    if Version("0.18.9") <= Version(deepspeed.__version__.partition("+")[0]) < Version("0.19"):
        # These versions make flat weights that require gradients, and torch 2.13 cannot gather into such
        # tensors: ZeRO 1 and 2 fail in their first step, with or without holmes.
        optimizer = stage_1_and_2.DeepSpeedZeroOptimizer
        optimizer.flatten_dense_tensors_aligned = torch.no_grad()(
            optimizer.flatten_dense_tensors_aligned
        )
    deepspeed.utils.logger.setLevel(100)


def session_of(
    rank: int, site: Site, plan: Plan, options: Options | None = None
) -> session.Session:
    """Return the state of holmes in a rank of a test: its flags, the emulated cluster and the plan for it.

    Each rank is on a node of its own.
    """
    process = Process(
        rank,
        world_size=plan.world_size,
        local_rank=0,
        local_world_size=1,
        master_addr="",  # not read: the ranks are already connected
        master_port=0,
        launcher="test",
    )
    return session.Session(options or Options(), process, site, plan, rank, maker=maker)
