"""Which backend carries a group's tensors: torch's get_backend() says "undefined" or "cpu:gloo,cuda:nccl" where a job names none, or several.

    init_process_group()                       with a GPU NCCL, else gloo
    init_process_group("gloo")                 gloo, for tensors on either
    init_process_group("cpu:gloo,cuda:nccl")   by the device of the tensor
"""

from __future__ import annotations

from typing import Any


def carrier(group: Any = None, device_type: str = "") -> str:
    """The backend's name ("nccl", "gloo") for tensors on `device_type` ("cpu", "cuda"); "": on the GPU where there is one, else on the CPU.

    group: None for all ranks.
    """
    import torch.distributed as dist

    return carrier_of(dist.get_backend(group), device_type)  # get_backend_config() does not know groups that split_group made


def carrier_of(backend: str, device_type: str = "") -> str:
    """The same for what a program gives, or torch tells, as a group's backend."""
    import torch

    by_device = backends(backend)
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return by_device[device_type] if device_type in by_device else next(iter(by_device.values()))


def backends(backend: str) -> dict[str, str]:
    """Device -> backend, as torch reads it."""
    from torch.distributed.distributed_c10d import BackendConfig

    return {device: str(name) for device, name in BackendConfig(backend).device_backend_map.items()}
