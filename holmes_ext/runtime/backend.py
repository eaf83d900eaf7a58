"""Backends of torch.distributed: names, options, and the kind of network that each backend can use.

torch's get_backend() returns "undefined" or "cpu:gloo,cuda:nccl" if a program names no backend or several.
Their meaning:

    init_process_group()                       NCCL if there is a GPU, else gloo
    init_process_group("gloo")                 gloo, for tensors on CPU and GPU
    init_process_group("cpu:gloo,cuda:nccl")   the backend of the tensor's device

traits_of(name) returns the row of this table: the properties of a backend that holmes needs to choose its
network. In torch 2.15:

    backend        network API       tensors on  communicator made       process group has a fixed GPU
    gloo           sockets           CPU, GPU    with the group          no
    nccl-legacy    verbs             GPU         at the first operation  only with device_id
    nccl, nccl2    verbs             GPU         with the group          yes
    nccl-lazy      verbs             GPU         with the group, and     yes
                                                 for each pair of ranks
                                                 that sends messages
    fake           verbs (as NCCL)   CPU, GPU    never                   no
    mpi, ucc       backend chooses   any         with the group          no
    nccl4py        backend chooses   GPU         with the group          yes

In torch 2.14, nccl2 and nccl-lazy make communicators and use GPUs like nccl-legacy. "nccl" is nccl-legacy
before torch 2.15. The environment variable TORCH_DIST_USE_NCCL2 selects nccl-legacy ("0") or nccl2 ("1").

Any other name was registered by another package. holmes cannot choose its networks, and prints a warning.

Source: _register_builtin_*_backend and _nccl2_device in torch/distributed/distributed_c10d.py of torch 2.15.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import Any

from holmes_ext.plan.traffic import SOCKETS, VERBS


class Connect(Enum):
    """Moment at which a backend makes the communicator of a new process group."""

    WITH_GROUP = "with the group"
    AT_FIRST_OPERATION = "at the first operation"


@dataclass(frozen=True)
class BackendTraits:
    """Properties of a torch.distributed backend: its name, network API, devices and communicators."""

    name: str
    network_api: str  # VERBS or SOCKETS; "" if the backend chooses its networks itself
    device_type: str = ""  # of its tensors: "cuda"; "" if it takes tensors on both CPU and GPU
    is_nccl: bool = False  # takes ProcessGroupNCCL.Options, and runs its operations on CUDA streams
    # The implementation of NCCL's backend that is new in torch 2.14. It names a communicator after its group.
    # Its synchronous operations return a Work whose wait() returns at once; those of nccl-legacy return None.
    is_nccl2: bool = False
    connects: Connect = Connect.WITH_GROUP
    #: Whether each pair of ranks that exchange messages has a communicator.
    has_pair_communicators: bool = False
    is_known: bool = True  # False: another package registered the backend


_LEGACY = BackendTraits(
    "nccl-legacy",
    VERBS,
    device_type="cuda",
    is_nccl=True,
    connects=Connect.AT_FIRST_OPERATION,
)
_TABLE = {
    traits.name: traits
    for traits in (
        BackendTraits("gloo", SOCKETS),
        BackendTraits("fake", VERBS),
        _LEGACY,
        BackendTraits("nccl4py", "", device_type="cuda"),
        BackendTraits("mpi", ""),
        BackendTraits("ucc", ""),
    )
}


def traits_of(name: str) -> BackendTraits:
    """Return the properties of a backend of torch.distributed: its networks, devices and communicators.

    torch has two implementations of NCCL's backend, nccl-legacy and the newer nccl2. Its version decides
    which of both is called "nccl". A backend that another package has registered is returned without a
    network that holmes can choose.

    Args:
        name: The backend of one device type, e.g. "gloo"; not a list such as "cpu:gloo,cuda:nccl".
    """
    name = name.lower()
    if name == "nccl":
        traits = _traits_of_nccl2() if _nccl_is_nccl2() else _LEGACY
    elif name == "nccl2":
        traits = _traits_of_nccl2()
    elif name == "nccl-lazy":
        # nccl2, with a communicator of its own for each pair of ranks that exchange messages.
        traits = replace(_traits_of_nccl2(), has_pair_communicators=True)
    else:
        return _TABLE.get(name) or BackendTraits(name, network_api="", is_known=False)
    return replace(traits, name=name)


def _traits_of_nccl2() -> BackendTraits:
    """Return the properties of torch's backend nccl2 in the installed version of torch.

    Since torch 2.15 it makes a communicator together with its process group; in torch 2.14, at the first
    operation of the group.
    """
    from torch.distributed import distributed_c10d

    if not hasattr(distributed_c10d, "_nccl2_device"):  # torch 2.14
        return replace(_LEGACY, is_nccl2=True)
    return replace(_LEGACY, is_nccl2=True, connects=Connect.WITH_GROUP)


def _nccl_is_nccl2() -> bool:
    """Return whether "nccl" names the newer implementation, nccl2, in the installed torch."""
    from torch.distributed import distributed_c10d

    create_nccl2 = getattr(distributed_c10d, "_create_nccl2_process_group", None)
    if create_nccl2 is None:  # torch before 2.14
        return False
    backend: Any = distributed_c10d.Backend
    backend._ensure_backend_registered("nccl")  # reads TORCH_DIST_USE_NCCL2, at the first call
    return backend._plugins["NCCL"].creator_fn is create_nccl2


def backend_of(group: Any = None, device_type: str = "") -> str:
    """Return the name of a group's backend, e.g. "nccl" or "gloo".

    Args:
        group: The process group; None for the group of all ranks.
        device_type: Device of the tensors, "cpu" or "cuda"; "" for the GPU if the host has a GPU, else the
            CPU.
    """
    import torch.distributed as dist

    # get_backend() also works for groups that split_group made; get_backend_config() does not.
    return backend_named(dist.get_backend(group), device_type)


def group_traits(group: Any) -> BackendTraits:
    """Return the properties of a process group's backend, such as the network API and the devices."""
    return traits_of(backend_of(group))


def group_ranks(group: Any) -> list[int]:
    """Return the global ranks of a group's members; `group` may be None for all ranks."""
    import torch.distributed as dist

    # torch before 2.8 does not take None.
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def backend_named(text: str, device_type: str = "") -> str:
    """Choose the backend of a device type from a text such as "cpu:gloo,cuda:nccl".

    If the text names no backend for the device type, the first backend is returned.

    Args:
        text: The backend as a program gives it or as torch returns it, e.g. "cpu:gloo,cuda:nccl".
        device_type: "cpu" or "cuda"; "" for the GPU if the host has a GPU, else the CPU.
    """
    import torch

    by_device = backends(text)
    if not device_type:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type in by_device:
        return by_device[device_type]
    return next(iter(by_device.values()))


def backends(text: str) -> dict[str, str]:
    """Parse a text of torch's backends into device type -> backend, e.g. {"cpu": "gloo", "cuda": "nccl"}."""
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
        E.g. ProcessGroupNCCL.Options; None if torch cannot return the backend's options (gloo before torch
        2.7).
    """
    import torch

    device_type = group_traits(group).device_type or "cpu"
    return getattr(group._get_backend(torch.device(device_type)), "options", None)


def timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a group's collectives; None if its backend has no options to read it from."""
    return getattr(options_of(group), "_timeout", None)


def network_api_of(backend: str) -> str:
    """Return the interface by which a backend sends over a network: "verbs" (RDMA) or "sockets" (TCP).

    "" is returned for a backend that chooses its networks itself.
    """
    return traits_of(backend).network_api


def one_hardware_queue() -> bool:
    """Return whether all CUDA streams share a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1).

    Kernels of all streams then start in the order of their launches, and a kernel that waits delays all later
    ones. Megatron-LM requires this setting for some overlaps. See "CUDA environment variables" in
    NVIDIA's CUDA C++ Programming Guide.
    """
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
