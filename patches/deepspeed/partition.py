"""DeepSpeed's PipelineModule under a planned partition, whatever partition_method the script chose.

    layer specs     to_half embedding positions | block block block block | norm head
    plan            stage_layers (3, 1):            block block block | block
    parts           0 .................................................. 6 ............. 9

The plan counts transformer blocks: specs of the class that repeats most. What stands before the first goes to
the first stage, after the last to the last stage, between two with the first of them.

A list of borders (specs, as in module.parts) is taken as partition_method too, [0, 6, 9] or "0,6,9":
DeepSpeed lacks it (deepspeedai/DeepSpeed#2974). It is the script's own choice, and wins over a plan.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import PARTITION
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.runtime import session
from holmes_ext.words import tell_user

_LIST = re.compile(r"\s*\d+(\s*,\s*\d+)+\s*")  # a partition_method like "0,6,9"
#: PipelineModule -> DeepSpeed's own borders, where the plan's have taken their place.
stock_parts: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


def class_name(spec: Any) -> str | None:
    """Of a layer spec or a module; None for functions and for tied specs, which are no blocks."""
    from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
    from torch.nn import Module

    if isinstance(spec, TiedLayerSpec):
        return None
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    return type(spec).__name__ if isinstance(spec, Module) else None


def most_frequent(names: Sequence[str | None], total: int = 0) -> str | None:
    """The class that repeats most, one that does so `total` times before its equals; None: there is none."""
    counts = Counter(name for name in names if name is not None)
    return max(counts, key=lambda name: (counts[name], counts[name] == total), default=None)


def borders_of(names: Sequence[str | None], stage_layers: Sequence[int], source: str) -> list[int]:
    """In specs of these classes (None: no block); HolmesError when the blocks are not the plan's layers."""
    total = sum(stage_layers)
    most = most_frequent(names, total)
    if most is None or names.count(most) != total:
        actual = f"{names.count(most)} layers of class {most}" if most else "no layer class that repeats"
        said = f"{source}: key 'stage_layers': {'+'.join(map(str, stage_layers))} = {total} layers"
        raise HolmesError(f"{said}, but the model has {actual}; make the plan for this model")
    blocks = [index for index, name in enumerate(names) if name == most]
    return [0, *(blocks[first] for first in itertools.accumulate(stage_layers[:-1])), len(names)]


def check_borders(borders: Sequence[Any], specs: int, stages: int) -> list[int]:
    """The user's own borders; HolmesError when they are not 0 < ... < specs, one more than stages."""
    problem = ""
    if not all(type(border) is int for border in borders):
        problem = "the borders must be whole numbers"
    elif len(borders) != stages + 1:
        problem = f"{len(borders)} borders for {stages} stages; give {stages + 1}, from 0 to {specs}"
    elif [*borders] != sorted({0, specs, *borders}):
        problem = f"the borders must rise from 0 to {specs}, the number of layers"
    if problem:
        raise HolmesError(f"partition_method {list(borders)}: {problem}")
    return list(borders)


@by_name
def _partition_layers(call, instance, method):
    """Assign layers to stages by the script's list of borders, or else by the plan.

    DeepSpeed's own partition runs first, because it checks and prints; the borders are then replaced. It does
    not accept a list, and therefore gets "uniform" in its place. Without a list and a plan, its partition
    stays.

    Raises:
        HolmesError: the script's borders are not valid, or the plan was made for other stages or layers.
    """
    stages = instance.num_stages
    specs = instance._layer_specs
    if isinstance(method, str) and _LIST.fullmatch(method):
        method = [int(border) for border in method.split(",")]
    if isinstance(method, (list, tuple)):
        borders = check_borders(method, len(specs), stages)
        result = call(method="uniform")
        source = "the script's borders"
    else:
        result = call()
        current = session.active()
        if current is None or not current.plan.stage_layers:
            return result
        plan = current.plan
        if len(plan.stage_layers) != stages:
            key = f"{plan.source}: key 'stage_layers' has {len(plan.stage_layers)} stages"
            raise HolmesError(f"{key}, but the module has {stages}; make the plan for this pipeline size")
        borders = borders_of([class_name(spec) for spec in specs], plan.stage_layers, plan.source)
        source = f"{plan.partition} partition, {'+'.join(map(str, plan.stage_layers))} blocks"
        stock_parts[instance] = instance.parts
    stage = instance._topo.get_coord(instance.global_rank).pipe
    instance.parts = borders
    instance._set_bounds(start=borders[stage], stop=borders[stage + 1])
    if instance.global_rank == 0:
        begins = ", ".join(map(str, borders[:-1]))
        tell_user(f"stages begin at layers {begins} of {len(specs)} ({source})")
    return result


PATCHES = (
    Patch(PARTITION, "deepspeed.runtime.pipe.module:PipelineModule._partition_layers",
          "PipelineModule takes no list of borders, and its methods know nothing of clusters",
          _partition_layers),
)  # fmt: skip
