"""DeepSpeed's pipeline engine with ZeRO 1: updated parameters travel while the next step's first forward pass runs.

    stock    OptimizerStep [update | all-gather        ] | next batch: forward 1 ...
    here     OptimizerStep [update ]  [layer 1][layer 2] | next batch: forward 1 ...     a layer waits for its own parameters

Part of --holmes-overlap on, for ZeRO 1 and BF16_Optimizer. Parameters are whole again when: the layer that holds them begins a forward pass
(training or evaluation); the module's state_dict, parameters() or named_parameters() is asked for; a checkpoint is saved or loaded;
the next optimizer step begins; DeepSpeed gathers again. A reference to a parameter that was taken before shows old values until then.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import OVERLAP_GATHER
from holmes_ext.patches.deepspeed.reduce import overlap_of
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.runtime import session

#: engine -> its _Gathers.
_gathers: weakref.WeakKeyDictionary[Any, _Gathers] = weakref.WeakKeyDictionary()
#: Engines whose optimizer step runs now.
_stepping: list[_Gathers] = []


def supported(engine: Any) -> bool:
    """Whether this engine's optimizer ends its step with all_gather_dp_groups over one group that is larger than one rank."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    groups = getattr(engine.optimizer, "real_dp_process_group", [])
    return type(engine.optimizer) in (BF16_Optimizer, DeepSpeedZeroOptimizer) and len(set(groups)) == 1 and engine.dp_world_size > 1


class _Gathers:
    """One engine's parameters on their way. Hooks make everything that reads them wait."""

    def __init__(self, engine: Any):
        from holmes_ext.runtime.reduce.gather import OrderedGather

        self.module = engine.module
        self.gather = OrderedGather(engine.optimizer.real_dp_process_group[0])
        self.handle: Any = None
        self.last_part: dict[int, int] = {}  # id of a parameter -> the last part that it is in
        self._hook()

    def _hook(self) -> None:
        hooked: set[int] = set()
        for layer in self.module.forward_funcs:
            if hasattr(layer, "register_forward_pre_hook"):
                parameters = list(layer.parameters())
                layer.register_forward_pre_hook(partial(self._before, parameters))
                hooked.update(map(id, parameters))
        tied = {id(p) for module in getattr(self.module, "tied_modules", {}).values() for p in module.parameters()}
        functions = [f for f in self.module.forward_funcs if not hasattr(f, "register_forward_pre_hook")]
        everything = list(self.module.parameters())
        if any(not isinstance(f, partial) or f.args[:1] not in [(m,) for m in self.module.tied_modules.values()] for f in functions):
            early = everything  # a function may read any of them
        else:
            early = [p for p in everything if id(p) in tied or id(p) not in hooked]
        self.module.register_forward_pre_hook(partial(self._before, early))
        for module in self.module.modules():
            module.register_state_dict_pre_hook(lambda *_: self.finish())
        own = self.module.named_parameters

        def named_parameters(*args: Any, **kwargs: Any) -> Any:
            self.finish()
            return own(*args, **kwargs)

        self.module.named_parameters = named_parameters  # parameters() reads it too

    def _before(self, parameters: list[Any], *_: Any) -> None:
        if self.handle is not None:
            last = max((self.last_part.get(id(p), -1) for p in parameters), default=-1)
            if last >= 0:
                self._waiting(self.handle.wait, last)

    def start(self, flats: list[Any], partitions: list[list[Any]]) -> None:
        """In place of all_gather_dp_groups."""
        from holmes_ext.runtime.reduce.gather import cut

        self.finish()
        order = {id(p): number for number, p in enumerate(self.module.parameters())}
        found = []
        for flat, parts in zip(flats, partitions):
            places = {id(p): _place(p, flat) for p in self.module.parameters() if _place(p, flat) is not None}
            used = [(start, stop, order[key]) for key, (start, stop) in places.items()]
            assert flat.numel() == parts[0].numel() * len(parts)
            found += [(piece, flat, places) for piece in cut(flat.numel(), len(parts), used, flat.element_size())]
        found.sort(key=lambda entry: entry[0].needed)
        self.last_part = {}
        for number, (piece, flat, places) in enumerate(found):
            for key, (start, stop) in places.items():
                if start < piece.stop and stop > piece.start:
                    self.last_part[key] = number
        self.handle = self.gather([(piece.owner, flat.detach()[piece.start : piece.stop]) for piece, flat, _ in found])

    def finish(self) -> None:
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self._waiting(handle.finish)

    def _waiting(self, call: Any, *args: Any) -> None:
        try:
            call(*args)
        except RuntimeError as error:
            from holmes_ext.runtime.watch.failure import describe_failure

            raise HolmesError(describe_failure("updated parameters (their all-gather)", self.gather.ranks, None, str(error))) from error


def _place(parameter: Any, flat: Any) -> tuple[int, int] | None:
    """Where in the flat buffer a parameter lies, or None."""
    if parameter.numel() == 0 or parameter.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
        return None
    start = parameter.storage_offset() - flat.storage_offset()
    return (start, start + parameter.numel()) if 0 <= start < flat.numel() else None


def finish_all() -> None:
    for gathers in list(_gathers.values()):
        gathers.finish()


def _wanted() -> bool:
    """--holmes-overlap on: between steps a program may hold references to parameters that are not whole yet, so auto does without."""
    current = session.active()
    return current is None or current.options.overlap == "on"


def _step(wrapped, instance, args, kwargs):
    """_exec_optimizer_step: the all-gather at its end is only started."""
    if not _wanted() or overlap_of(instance) is None or not supported(instance):
        return wrapped(*args, **kwargs)
    if instance not in _gathers:
        _gathers[instance] = _Gathers(instance)
    _gathers[instance].finish()
    _stepping.append(_gathers[instance])
    try:
        return wrapped(*args, **kwargs)
    finally:
        _stepping.pop()


def _all_gather(wrapped, instance, args, kwargs):
    """all_gather_dp_groups: started in an optimizer step, else done."""
    given = dict(zip(("groups_flat", "partitioned_param_groups"), args)) | kwargs
    if _stepping:
        return _stepping[-1].start(given["groups_flat"], given["partitioned_param_groups"])
    finish_all()
    return wrapped(*args, **kwargs)


def _whole(wrapped, instance, args, kwargs):
    """save_checkpoint, load_checkpoint: all parameters are there."""
    finish_all()
    return wrapped(*args, **kwargs)


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"

PATCHES = (
    Patch(
        OVERLAP_GATHER, "deepspeed.runtime.pipe.engine:PipelineEngine._exec_optimizer_step",
        "whose all-gather may go on after it", _step,
        rebind=("deepspeed.runtime.pipe.engine:PipelineEngine._INSTRUCTION_MAP[OptimizerStep]",),
    ),
    Patch(
        OVERLAP_GATHER, "deepspeed.runtime.utils:all_gather_dp_groups",
        "ZeRO 1 waits for all updated parameters before the next forward pass may begin",
        _all_gather, parameters=("groups_flat", "partitioned_param_groups"),
    ),
    *(
        Patch(OVERLAP_GATHER, f"{_ENGINE}.{name}", "reads or replaces parameters that may be on their way", _whole)
        for name in ("save_checkpoint", "load_checkpoint")
    ),
)  # fmt: skip
