"""Reads settings of DeepSpeed's engines and optimizers that releases of DeepSpeed store in different places.

A table has readers for each setting: one for each place where releases store it, with the first such release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from packaging.version import Version

from holmes_ext.patches.engine.patch import installed_version, release_of


class Reader(NamedTuple):
    """Function that reads one setting of DeepSpeed in a range of DeepSpeed's releases.

    Releases store the same setting in different attributes of the engine or optimizer. _TABLE
    therefore lists one or more Readers for each setting. read_by_version() uses the Reader for the
    installed release.
    """

    since: str  # first release; the last one is that before the next reader of the same setting
    read: Callable[[Any], Any]  # takes the engine or the optimizer


#: Reader for the oldest releases, if they lack the setting.
_NEVER = Reader("0", lambda _: False)


def _uses_muon(zero: Any) -> bool:
    """Return whether ZeRO's optimizer updates weights by Muon."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    return isinstance(zero.optimizer, MuonWithAuxAdam)


def _uses_compact_buffer(zero: Any) -> bool:
    """Return whether ZeRO's optimizer sums the micro-batches' gradients outside of the parameters' .grad.

    DeepSpeed 0.19.8 and later can keep the sums in a buffer that has only the elements of this rank's
    partition ("compact"). A parameter's .grad then has the latest micro-batch's gradient only.
    """
    groups = range(len(zero.bit16_groups))
    return any(zero._use_compact_grad_partition_buffer(group) for group in groups)


def offsets(group: list[Any]) -> list[int]:
    """Return the index of each parameter's first element in a flat buffer of all parameters, without padding.

    Args:
        group: The parameters, in the order of the buffer.
    """
    starts = []
    next_start = 0
    for parameter in group:
        starts.append(next_start)
        next_start += parameter.numel()
    return starts


#: Name of a setting -> its readers, from the oldest release to the newest.
_TABLE: dict[str, tuple[Reader, ...]] = {
    # Settings of an engine.
    "dynamic_shape": (_NEVER, Reader("0.15.0", lambda engine: engine.dynamic_shape)),
    "deepcompile": (_NEVER, Reader("0.16.6", lambda engine: engine.is_deepcompile_enabled())),
    "torch_autocast": (_NEVER, Reader("0.17.2", lambda engine: engine.torch_autocast_enabled())),
    "zenflow": (_NEVER, Reader("0.17.5", lambda engine: bool(engine.zenflow))),
    "immediate_grad_update": (
        Reader("0", lambda engine: engine._config.bfloat16_immediate_grad_update),
        Reader("0.17.1", lambda engine: engine._config.bfloat16_config.immediate_grad_update),
    ),
    "decoupled_checkpoint": (
        _NEVER,
        Reader("0.17.1", lambda engine: engine.checkpoint_engine.is_decoupled()),
    ),
    # Settings of ZeRO's optimizer (stages 1 and 2).
    # Whether it sums the gradients of the micro-batches in another tensor than the parameter's
    # .grad.
    "sums_outside_grad": (
        Reader("0", lambda zero: zero.use_grad_accum_attribute),
        Reader("0.19.8", _uses_compact_buffer),
    ),
    # For each parameter group: the first element of each parameter in the group's flat buffer. DeepSpeed
    # 0.19.7 and later align it for some partitions.
    "offsets": (
        Reader("0", lambda zero: list(map(offsets, zero.round_robin_bit16_groups))),
        Reader("0.19.7", lambda zero: zero.round_robin_bit16_offsets),
    ),
    "muon": (_NEVER, Reader("0.17.6", _uses_muon)),
}


def read_by_version(name: str, holder: Any) -> Any:
    """Return a setting of a DeepSpeed engine or optimizer, whichever release of DeepSpeed is installed.

    Args:
        name: A key of _TABLE, such as "zenflow".
        holder: The engine or optimizer that has the setting. See _TABLE.
    """
    installed = release_of(installed_version("deepspeed") or "")
    for reader in reversed(_TABLE[name]):  # the newest first
        if Version(reader.since) <= installed:
            return reader.read(holder)
    raise AssertionError(f"setting {name!r} has no reader for DeepSpeed {installed}")
