"""What DeepSpeed needs to train in a test's processes, on CPUs that stand for the GPUs of nodes of their
own."""

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
    """In each rank, in place of deepspeed.init_distributed()."""
    os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1", LOCAL_WORLD_SIZE="1")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # half a minute of compiling, and not used
    )
    deepspeed.init_distributed()
    accelerator = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: (
        True
    )  # torch can; DeepSpeed asks for AMX, or (0.16.7) says no
    accelerator.supported_dtypes = lambda: [torch.float, torch.bfloat16, torch.float16]
    if accelerator.Stream is None:  # 0.16: activation checkpointing makes one all the same
        type(accelerator).Stream = staticmethod(lambda device: None)
    # it looks for "torch.cpu.FloatTensor", in vain
    if not stage_1_and_2.split_half_float_double([torch.zeros(1)]):
        stage_1_and_2.split_half_float_double = lambda tensors: [tensors]
    if Version("0.18.9") <= Version(deepspeed.__version__.partition("+")[0]) < Version("0.19"):
        # Its flat weights, made of parameters where there is much memory, ask for gradients, and torch 2.13
        # lets nobody gather into them: ZeRO 1 and 2 end in their first step, with or without holmes (`holmes
        # doctor` says so).
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
