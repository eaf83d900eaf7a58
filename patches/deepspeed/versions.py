"""Reads settings of DeepSpeed's engines and optimizers that releases of DeepSpeed store in different places.

A table has, for each setting, the releases that moved it and a function that reads it from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from packaging.version import Version

from holmes_ext.patches.engine.patch import installed_version, release_of


def _muon(zero: Any) -> bool:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    return isinstance(zero.optimizer, MuonWithAuxAdam)


def offsets(group: list[Any]) -> list[int]:
    """Return the index at which each parameter begins in a flat buffer of all parameters, without padding.

    Args:
        group: The parameters, in the order of the buffer.
    """
    return [end - p.numel() for p, end in zip(group, accumulate(p.numel() for p in group))]


# An entry of the table for the oldest releases, which lack the setting.
_NEVER = (
    "0",
    lambda _: False,
)


def _compact(zero: Any) -> bool:
    return any(map(zero._use_compact_grad_partition_buffer, range(len(zero.bit16_groups))))


#: Name of a setting -> pairs (release of DeepSpeed, function that reads the setting). A function is for its
#: release and later ones, up to that of the next pair. It takes the engine or the optimizer.
_TABLE: dict[str, tuple[tuple[str, Callable[[Any], Any]], ...]] = {
    # Settings of an engine.
    "dynamic_shape": (_NEVER, ("0.15.0", lambda engine: engine.dynamic_shape)),
    "deepcompile": (_NEVER, ("0.16.6", lambda engine: engine.is_deepcompile_enabled())),
    "torch_autocast": (_NEVER, ("0.17.2", lambda engine: engine.torch_autocast_enabled())),
    "zenflow": (_NEVER, ("0.17.5", lambda engine: bool(engine.zenflow))),
    "immediate_grad_update": (
        ("0", lambda engine: engine._config.bfloat16_immediate_grad_update),
        ("0.17.1", lambda engine: engine._config.bfloat16_config.immediate_grad_update),
    ),
    "decoupled_checkpoint": (
        _NEVER,
        ("0.17.1", lambda engine: engine.checkpoint_engine.is_decoupled()),
    ),
    # Settings of ZeRO's optimizer (stages 1 and 2).
    # Whether get_gradient_for_reduction returns a copy of the gradient, or one in another buffer than the one
    # that is reduced.
    "accumulates_apart": (("0", lambda zero: zero.use_grad_accum_attribute), ("0.19.8", _compact)),
    # For each parameter group: the first element of each parameter in the group's flat buffer. DeepSpeed
    # 0.19.7 and later align it for some partitions.
    "offsets": (
        ("0", lambda zero: list(map(offsets, zero.round_robin_bit16_groups))),
        ("0.19.7", lambda zero: zero.round_robin_bit16_offsets),
    ),
    "muon": (_NEVER, ("0.17.6", _muon)),
}


def read_by_version(name: str, holder: Any) -> Any:
    """Return a setting of a DeepSpeed engine or optimizer, whichever release of DeepSpeed is installed.

    Args:
        name: A key of _TABLE, such as "zenflow".
        holder: The engine or optimizer that has the setting. _TABLE says which of them.
    """
    installed = release_of(installed_version("deepspeed") or "")
    # Pairs (release, function that reads the setting from then on).
    newest_first = reversed(_TABLE[name])
    read_setting = next(reader for since, reader in newest_first if Version(since) <= installed)
    return read_setting(holder)
