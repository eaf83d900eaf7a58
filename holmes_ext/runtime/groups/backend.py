"""Which backend a group's tensors travel by, and what of a node's ports that backend can use.

torch's get_backend() says "undefined" or "cpu:gloo,cuda:nccl" where a job names none, or several:

    init_process_group()                       with a GPU NCCL, else gloo
    init_process_group("gloo")                 gloo, for tensors on either
    init_process_group("cpu:gloo,cuda:nccl")   by the device of the tensor
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from holmes_ext.plan.traffic import SOCKETS, VERBS


def backend_of(group: Any = None, device_type: str = "") -> str:
    """The backend's name ("nccl", "gloo", ...) for tensors on `device_type` ("cpu", "cuda"; "": the GPU if
    any).

    group: None for all ranks.
    """
    import torch.distributed as dist

    # get_backend_config() knows no groups of split_group
    return backend_named(dist.get_backend(group), device_type)


def group_ranks(group: Any) -> list[int]:
    """Its members, as the job numbers them."""
    import torch.distributed as dist

    return dist.get_process_group_ranks(group or dist.group.WORLD)  # None: from torch 2.8 on


def backend_named(text: str, device_type: str = "") -> str:
    """The same for what a program gives, or torch tells, as a group's backend."""
    import torch

    by_device = backends(text)
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return by_device[device_type] if device_type in by_device else next(iter(by_device.values()))


def backends(text: str) -> dict[str, str]:
    """Device -> backend, as torch reads it."""
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    return {device: str(name) for device, name in BackendConfig(Backend(text)).device_backend_map.items()}


def options_of(group: Any) -> Any:
    """What the group was made with, by its backend; None where that does not tell (gloo before torch 2.7)."""
    import torch

    return getattr(group._get_backend(torch.device("cuda" if backend_of(group) == "nccl" else "cpu")),
                   "options", None)


def timeout_of(group: Any) -> timedelta | None:
    """Of the group's collectives; None, torch's default, where its backend does not tell."""
    return getattr(options_of(group), "_timeout", None)


def network_api_of(backend: str) -> str:
    """What of a node's ports the backend can use, "verbs" or "sockets"; "" where it finds its networks itself
    (UCC, MPI: for all groups of a process alike). torch's "fake" stands for NCCL."""
    return {"nccl": VERBS, "fake": VERBS, "gloo": SOCKETS}.get(backend, "")


def one_hardware_queue() -> bool:
    """Whether kernels of all streams start in the order in which they were launched: one that waits holds up
    all behind it. (NVIDIA's CUDA C++ Programming Guide, environment variables; Megatron asks for it.)"""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
