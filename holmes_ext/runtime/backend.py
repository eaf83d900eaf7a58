"""Backend of a process group: its name, its options, and the networks that it can use.

torch's get_backend() returns "undefined" or "cpu:gloo,cuda:nccl" if a program names no backend, or several:

    init_process_group()                       NCCL if there is a GPU, else gloo
    init_process_group("gloo")                 gloo, for tensors on CPU and GPU
    init_process_group("cpu:gloo,cuda:nccl")   the backend of the tensor's device

backend_table.py says what the names mean.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from holmes_ext.runtime.backend_table import traits_of

if TYPE_CHECKING:
    from holmes_ext.runtime.backend_table import BackendTraits


def backend_of(group: Any = None, device_type: str = "") -> str:
    """Return the name of a group's backend, e.g. "nccl" or "gloo".

    Args:
        group: The process group; None for the group of all ranks.
        device_type: Device of the tensors, "cpu" or "cuda"; "" for the GPU if there is one, else the CPU.
    """
    import torch.distributed as dist

    # get_backend() also works for groups that split_group made; get_backend_config() does not.
    return backend_named(dist.get_backend(group), device_type)


def group_traits(group: Any) -> BackendTraits:
    """Return the row of the backend table for a process group."""
    return traits_of(backend_of(group))


def group_ranks(group: Any) -> list[int]:
    """Return the global ranks of a group's members; `group` may be None for all ranks."""
    import torch.distributed as dist

    return dist.get_process_group_ranks(group or dist.group.WORLD)  # torch before 2.8 does not take None


def backend_named(text: str, device_type: str = "") -> str:
    """Return the backend for one device type. If there is none, return the first backend in `text`.

    Args:
        text: The backend as a program gives it or as torch returns it, e.g. "cpu:gloo,cuda:nccl".
        device_type: "cpu" or "cuda"; "" for the GPU if there is one, else the CPU.
    """
    import torch

    by_device = backends(text)
    if not device_type:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type in by_device:
        return by_device[device_type]
    return next(iter(by_device.values()))


def backends(text: str) -> dict[str, str]:
    """Return the backend of each device type, as torch reads `text`, e.g. {"cpu": "gloo", "cuda": "nccl"}."""
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    device_backends = BackendConfig(Backend(text)).device_backend_map
    return {device: str(name) for device, name in device_backends.items()}


def nccl_backend_in(text: str) -> str:
    """Return the name of the NCCL backend among those in `text`; "" if there is none.

    Args:
        text: The backend as a program gives it or as torch returns it, e.g. "cpu:gloo,cuda:nccl".
    """
    return next((name for name in backends(text).values() if traits_of(name).is_nccl), "")


def options_of(group: Any) -> Any:
    """Return the options that a group's backend was made with.

    Returns:
        E.g. ProcessGroupNCCL.Options; None if the backend does not tell them (gloo before torch 2.7).
    """
    import torch

    device_type = group_traits(group).device_type or "cpu"
    return getattr(group._get_backend(torch.device(device_type)), "options", None)


def timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a group's collectives; None if its backend has no options to read it from."""
    return getattr(options_of(group), "_timeout", None)


def network_api_of(backend: str) -> str:
    """Return how a backend reaches a network: "verbs" or "sockets".

    "" is returned for a backend that chooses its networks itself.
    """
    return traits_of(backend).network_api


def one_hardware_queue() -> bool:
    """Whether kernels of all streams start in the order in which they were launched: one that waits holds up
    all behind it. (NVIDIA's CUDA C++ Programming Guide, environment variables; Megatron asks for it.)"""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
