"""Splits DeepSpeed's PipelineModule into stages as planned, whatever partition_method the script chose.

    layer specs     to_half embedding positions | block block block block | norm head
    plan            stage_layers (3, 1):            block block block | block
    borders         0 .................................................. 6 ............. 9

A layer spec describes one layer of the model, or one module such as the embedding. Borders are the first spec
of each stage and the number of specs, as in DeepSpeed's module.parts.

The plan gives the number of transformer blocks of each stage. Blocks are the specs of the class that repeats
most. Specs before the first block go to the first stage, specs after the last block to the last stage, and
specs between two blocks to the stage of the first of them.

The script may also give borders itself, as partition_method=[0, 6, 9] or "0,6,9", which DeepSpeed lacks
(deepspeedai/DeepSpeed#2974). They take precedence over the plan.
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

_BORDER_LIST = re.compile(r"\s*\d+(\s*,\s*\d+)+\s*")  # a partition_method such as "0,6,9"
#: PipelineModule -> the borders that DeepSpeed made, where the plan's have replaced them. A checkpoint that
#: was saved without holmes has these borders (checkpoints.py).
stock_parts: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


def class_name(spec: Any) -> str | None:
    """Return the class name of a layer spec or a module; None for functions and tied specs.

    These two cannot be transformer blocks.
    """
    from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec
    from torch.nn import Module

    if isinstance(spec, TiedLayerSpec):
        return None
    if isinstance(spec, LayerSpec):
        return spec.typename.__name__
    if isinstance(spec, Module):
        return type(spec).__name__
    return None


def most_frequent(names: Sequence[str | None]) -> str | None:
    """Return the class that occurs most often; None if there are only functions and tied specs."""
    counts = Counter(name for name in names if name is not None)
    return max(counts, key=lambda name: counts[name], default=None)


def borders_of(names: Sequence[str | None], stage_layers: Sequence[int], source: str) -> list[int]:
    """Return the borders that give each stage its number of transformer blocks.

    Args:
        names: Class of each layer spec; None for specs that cannot be blocks.
        stage_layers: Blocks of each stage.
        source: Where stage_layers comes from, for the error.

    Raises:
        HolmesError: The model has another number of blocks than the stages together.
    """
    total = sum(stage_layers)
    block_class = most_frequent(names)
    block_indices = [index for index, name in enumerate(names) if name == block_class]
    if block_class is None or len(block_indices) != total:
        if block_class is None:
            actual = "no layer class that repeats"
        else:
            actual = f"{len(block_indices)} layers of class {block_class}"
        planned = f"{source}: key 'stage_layers': {'+'.join(map(str, stage_layers))} = {total} layers"
        raise HolmesError(f"{planned}, but the model has {actual}; make the plan for this model")
    blocks_before = itertools.accumulate(stage_layers[:-1])  # in the stages before each but the first
    later_borders = [block_indices[count] for count in blocks_before]
    return [0, *later_borders, len(names)]


def check_borders(borders: Sequence[Any], specs: int, stages: int) -> list[int]:
    """Return the borders that the script gave, as a list.

    Args:
        specs: Number of layer specs of the model.
        stages: Number of pipeline stages.

    Raises:
        HolmesError: The borders are not whole numbers that rise from 0 to `specs`, one more than stages.
    """
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

    DeepSpeed's own partition runs first, because it also checks the module and prints the stages; its borders
    are then replaced. Without a list and without planned layers, DeepSpeed's borders stay.

    Raises:
        HolmesError: The script's borders are not valid, or the plan was made for other stages or layers.
    """
    specs = instance._layer_specs
    script_borders = _borders_given_as(method)
    if script_borders is not None:
        borders = check_borders(script_borders, len(specs), instance.num_stages)
        result = call(method="uniform")  # DeepSpeed does not accept a list
        _set_borders(instance, borders, "the script's borders")
        return result

    result = call()
    current = session.active()
    if current is None or not current.plan.stage_layers:
        return result
    plan = current.plan
    if len(plan.stage_layers) != instance.num_stages:
        key = f"{plan.source}: key 'stage_layers' has {len(plan.stage_layers)} stages"
        raise HolmesError(
            f"{key}, but the module has {instance.num_stages}; make the plan for this pipeline size"
        )
    borders = borders_of([class_name(spec) for spec in specs], plan.stage_layers, plan.source)
    stock_parts[instance] = instance.parts
    blocks = "+".join(map(str, plan.stage_layers))
    _set_borders(instance, borders, f"{plan.partition} partition, {blocks} blocks")
    return result


def _borders_given_as(method: Any) -> Sequence[Any] | None:
    """Return the borders in a partition_method such as [0, 6, 9] or "0,6,9"; None for DeepSpeed's methods."""
    if isinstance(method, (list, tuple)):
        return method
    if isinstance(method, str) and _BORDER_LIST.fullmatch(method):
        return [int(border) for border in method.split(",")]
    return None


def _set_borders(module: Any, borders: list[int], source: str) -> None:
    """Replace the borders of a PipelineModule, and print them on rank 0.

    Args:
        source: Where the borders come from, for the user.
    """
    stage = module._topo.get_coord(module.global_rank).pipe
    module.parts = borders
    module._set_bounds(start=borders[stage], stop=borders[stage + 1])
    if module.global_rank == 0:
        first_layers = ", ".join(map(str, borders[:-1]))
        specs = len(module._layer_specs)
        tell_user(f"stages begin at layers {first_layers} of {specs} ({source})")


PATCHES = (
    Patch(PARTITION, "deepspeed.runtime.pipe.module:PipelineModule._partition_layers",
          "PipelineModule takes no list of borders, and its methods know nothing of clusters",
          _partition_layers),
)  # fmt: skip
