"""Gives each pipeline stage of DeepSpeed's PipelineModule the planned number of transformer blocks.

The model of a PipelineModule is a list of layer specs: each describes one layer, such as a transformer block
or the embedding. DeepSpeed cuts the list into stages by itself. Here the plan of the job, made before the job
starts, says how many blocks each stage gets:

    layer specs       to_half embedding positions   block block block | block   norm head
    index             0       1         2           3     4     5       6       7    8
    planned blocks    3 on stage 0, 1 on stage 1
    borders           0, 6, 9: stage 0 has specs 0 to 5, stage 1 has specs 6 to 8

Borders are the index of the first spec of each stage, and then the number of specs. DeepSpeed stores them in
module.parts.

Blocks are the specs of the class that occurs most often. All specs before the first block go to the first
stage. All specs after the last block go to the last stage. Specs between two blocks go to the stage of the
earlier block.

A script may also give borders itself, as partition_method=[0, 6, 9] or "0,6,9". They take precedence over the
plan. DeepSpeed alone does not accept them (deepspeedai/DeepSpeed#2974).
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
from holmes_ext.patches.engine.wrap import Call, by_name
from holmes_ext.runtime import session
from holmes_ext.words import counted, tell_user

_BORDER_LIST = re.compile(r"\s*\d+(\s*,\s*\d+)+\s*")  # a partition_method such as "0,6,9"
#: PipelineModule -> the borders that DeepSpeed made, if planned borders have replaced them. A checkpoint that
#: was saved without holmes has DeepSpeed's borders; checkpoints.py reads them here.
stock_parts: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


def class_name(spec: Any) -> str | None:
    """Return the class name of a layer of DeepSpeed's PipelineModule, if it may be a transformer block.

    Return None for functions and tied layers (TiedLayerSpec): they are never transformer blocks.

    Args:
        spec: An entry of the list of layers: a LayerSpec, a torch module or a function.
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
    """Return the class name that occurs most often, or None if all entries are None.

    Args:
        names: Class name of each layer of a model; None for layers that cannot be transformer blocks.
    """
    counts = Counter(name for name in names if name is not None)
    return max(counts, key=lambda name: counts[name], default=None)


def borders_of(names: Sequence[str | None], stage_layers: Sequence[int], source: str) -> list[int]:
    """Return the index of the first layer of each pipeline stage, and then the number of layers.

    The transformer blocks of a model are the layers of the class that occurs most often.

    Args:
        names: Class name of each layer of the model; None for layers that cannot be transformer blocks.
        stage_layers: Number of transformer blocks of each stage.
        source: Where stage_layers comes from, such as the name of a file. Only used in the error message.

    Raises:
        HolmesError: The number of transformer blocks in the model is not the sum of stage_layers.
    """
    total = sum(stage_layers)
    block_class = most_frequent(names)
    block_indices = [index for index, name in enumerate(names) if name == block_class]
    if block_class is None or len(block_indices) != total:
        if block_class is None:
            actual = "no layer class that repeats"
        else:
            actual = f"{counted(len(block_indices), 'layer')} of class {block_class}"
        layers = "+".join(map(str, stage_layers))
        planned = f"{source}: key 'stage_layers': {layers} = {counted(total, 'layer')}"
        raise HolmesError(f"{planned}, but the model has {actual}; make the plan for this model")

    # The first stage begins at layer 0. Each later stage begins at its first block: with n blocks in all the
    # stages before it, that is block n.
    blocks_in_stages_before = itertools.accumulate(stage_layers[:-1])
    later_borders = [block_indices[count] for count in blocks_in_stages_before]
    return [0, *later_borders, len(names)]


def check_borders(borders: Sequence[Any], specs: int, stages: int) -> list[int]:
    """Return the borders of a script's pipeline stages as a list, after checking them.

    Args:
        borders: Index of the first layer of each stage, and then the number of layers, e.g. [0, 6, 9].
        specs: Number of layers of the model.
        stages: Number of pipeline stages.

    Raises:
        HolmesError: An entry is no int, there are not stages + 1, or they do not rise from 0 to specs.
    """
    problem = ""
    are_ints = all(type(border) is int for border in borders)  # type(): a bool is no border
    if not are_ints:
        problem = "the borders must be whole numbers"
    elif len(borders) != stages + 1:
        problem = (
            f"{len(borders)} borders for {stages} stages; give {stages + 1}, from 0 to {specs}"
        )
    elif borders[0] != 0 or borders[-1] != specs or list(borders) != sorted(set(borders)):
        problem = f"the borders must rise from 0 to {specs}, the number of layers"
    if problem:
        raise HolmesError(f"partition_method {list(borders)}: {problem}")
    return list(borders)


@by_name
def _partition_layers(call: Call, instance: Any, method: Any) -> Any:
    """Assign the layers of a PipelineModule to pipeline stages.

    This wrapper runs in place of PipelineModule._partition_layers; call() runs the original. The first of
    these that exists decides:

    1. The borders in the script's partition_method: the index of the first layer of each stage, and then the
       number of layers.
    2. The number of transformer blocks that the plan of the job has for each stage.
    3. DeepSpeed's own partition. It always runs first, because it also checks the module and prints the
       stages.

    Raises:
        HolmesError: The script's borders are not valid (raised by check_borders). Or the plan was made for
            other stages, or for other layers (raised by borders_of).
    """
    specs = instance._layer_specs  # one entry for each layer of the model
    script_borders = _borders_given_as(method)
    if script_borders is not None:
        borders = check_borders(script_borders, len(specs), instance.num_stages)
        result = call(method="uniform")  # DeepSpeed's partition: it does not accept borders
        _set_borders(instance, borders, "the script's borders")
        return result

    result = call()
    current = session.active()  # has the plan; None if this process was started without holmes
    if current is None or not current.plan.stage_layers:
        return result
    plan = current.plan
    if len(plan.stage_layers) != instance.num_stages:
        planned = f"{plan.source}: key 'stage_layers' has {len(plan.stage_layers)} stages"
        raise HolmesError(
            f"{planned}, but the module has {instance.num_stages}; make the plan for this pipeline size"
        )
    borders = borders_of([class_name(spec) for spec in specs], plan.stage_layers, plan.source)
    stock_parts[instance] = instance.parts  # DeepSpeed's borders; read when a checkpoint is loaded
    blocks = "+".join(map(str, plan.stage_layers))
    _set_borders(instance, borders, f"{plan.partition} partition, {blocks} blocks")
    return result


def _borders_given_as(method: Any) -> Sequence[Any] | None:
    """Return the list of layer indices in a partition_method such as [0, 6, 9] or "0,6,9".

    Return None for DeepSpeed's own methods, such as "uniform".
    """
    if isinstance(method, (list, tuple)):
        return method
    if isinstance(method, str) and _BORDER_LIST.fullmatch(method):
        return [int(border) for border in method.split(",")]
    return None


def _set_borders(module: Any, borders: list[int], source: str) -> None:
    """Assign the layers of a PipelineModule to pipeline stages, and print the assignment on rank 0.

    Args:
        borders: Index of the first layer of each stage, and then the number of layers.
        source: Where the borders come from, such as "the script's borders". It is printed.
    """
    stage = module._topo.get_coord(module.global_rank).pipe
    module.parts = borders
    module._set_bounds(start=borders[stage], stop=borders[stage + 1])  # layers of this rank
    if module.global_rank == 0:
        first_layers = ", ".join(map(str, borders[:-1]))
        specs = len(module._layer_specs)
        tell_user(f"stages begin at layers {first_layers} of {specs} ({source})")


PATCHES = (
    Patch(
        PARTITION,
        "deepspeed.runtime.pipe.module:PipelineModule._partition_layers",
        "PipelineModule accepts no list of borders, and its partition methods ignore clusters",
        _partition_layers,
    ),
)
