"""What DeepSpeed's versions call differently: one table. All else that holmes uses is alike."""

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
    """First elements of parameters that stand one after the other."""
    return [end - p.numel() for p, end in zip(group, accumulate(p.numel() for p in group))]


_NEVER = ("0", lambda _: False)


def _compact(zero: Any) -> bool:
    return any(map(zero._use_compact_grad_partition_buffer, range(len(zero.bit16_groups))))


#: How an engine or optimizer answers. A line stands for the release that it names and every later one, up to
#: the next line of that name; the oldest first.
_TABLE: dict[str, tuple[tuple[str, Callable[[Any], Any]], ...]] = {
    # of an engine
    "dynamic_shape": (_NEVER, ("0.15.0", lambda engine: engine.dynamic_shape)),
    "deepcompile": (_NEVER, ("0.16.6", lambda engine: engine.is_deepcompile_enabled())),
    "torch_autocast": (_NEVER, ("0.17.2", lambda engine: engine.torch_autocast_enabled())),
    "zenflow": (_NEVER, ("0.17.5", lambda engine: bool(engine.zenflow))),
    "immediate_grad_update": (
        ("0", lambda engine: engine._config.bfloat16_immediate_grad_update),
        ("0.17.1", lambda engine: engine._config.bfloat16_config.immediate_grad_update),
    ),
    "decoupled_checkpoint": (_NEVER, ("0.17.1", lambda engine: engine.checkpoint_engine.is_decoupled())),
    # of ZeRO's optimizer (stages 1 and 2): whether get_gradient_for_reduction gives a copy, or gradients that
    # lie in another buffer than the one that is reduced
    "accumulates_apart": (("0", lambda zero: zero.use_grad_accum_attribute), ("0.19.8", _compact)),
    # where each group's parameters stand in it, aligned for some partitions since 0.19.7
    "offsets": (
        ("0", lambda zero: list(map(offsets, zero.round_robin_bit16_groups))),
        ("0.19.7", lambda zero: zero.round_robin_bit16_offsets),
    ),
    "muon": (_NEVER, ("0.17.6", _muon)),
}  # fmt: skip


def ask(name: str, of: Any) -> Any:
    """What the installed version answers to `name` of the table, of an engine or an optimizer."""
    installed = release_of(installed_version("deepspeed") or "")
    answer = next(answer for since, answer in reversed(_TABLE[name]) if Version(since) <= installed)
    return answer(of)
