"""Postpones NCCL communicators of torch 2.15 to the first operation of their group.

The backends nccl2 and nccl-lazy make the communicator of a group together with the group, and split it from
the group of all ranks. The older nccl-legacy makes it at the group's first operation. holmes postpones it in
two cases:

    groups that only their members make (members.py)   A split needs all ranks of the job.
    groups of Megatron                                 Megatron makes many groups and uses few of them. Each
                                                       communicator occupies memory of the GPU.

Other groups of a program are not postponed. If the first operation of a group is a message between two of its
ranks, a postponed communicator would wait for the other ranks without end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holmes_ext.runtime.backend import Connect, traits_of


class _State:
    """State of this module: whether new groups get their NCCL communicators at their first operation."""

    postpones: bool = False  # True inside the `with` block of postponed()


_state = _State()


@contextmanager
def postponed() -> Iterator[None]:
    """Let each group made in the `with` block create its communicator at its first operation.

    Otherwise torch creates the NCCL communicator together with the group. All ranks of a group must
    make it inside such a block. All of them must also take part in the group's first operation,
    since they create the communicator there together.
    """
    before = _state.postpones  # True inside an outer postponed() block
    _state.postpones = True  # read by are_postponed() when a group is made
    try:
        yield
    finally:
        _state.postpones = before


def are_postponed(backend: str, options: Any) -> bool:
    """Return whether the communicator of a new group is to be made at the group's first operation.

    True inside a postponed() block, if the backend has an option for this, `lazy_init`. But if the program
    has chosen the group's network itself (`net_name` in its options), holmes leaves all options of the
    group as they are, and so does not set `lazy_init`: False.

    Args:
        backend: "nccl" or another name of NCCL, such as "nccl2".
        options: The options that the program gave for the group, or None.
    """
    has_net_name = options is not None and bool(getattr(options.config, "net_name", None))
    return _state.postpones and not has_net_name and can_postpone(backend)


def can_postpone(backend: str) -> bool:
    """Return whether an NCCL backend obeys the option `lazy_init`.

    With `lazy_init`, a group creates its communicator at its first operation. nccl2 and nccl-lazy
    have the option since torch 2.15. nccl-legacy ignores it, since it always does so.
    """
    import torch.distributed as dist

    if not hasattr(dist, "ProcessGroupNCCL"):  # torch was built without NCCL
        return False
    torch_has_option = hasattr(dist.ProcessGroupNCCL.Options(), "lazy_init")
    return torch_has_option and traits_of(backend).connects is Connect.WITH_GROUP


def with_lazy_init(options: Any) -> Any:
    """Return NCCL options by which a group creates its communicator at its first operation.

    This is the option `lazy_init`. Without it, torch creates the communicator with the group.

    Args:
        options: ProcessGroupNCCL.Options, changed and returned; None for new options.
    """
    from torch.distributed import ProcessGroupNCCL

    if options is None:
        options = ProcessGroupNCCL.Options()
    options.lazy_init = True
    return options
