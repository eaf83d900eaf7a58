"""What Megatron-LM and Megatron-DeepSpeed will refuse of a layout, with the nearest that they take."""

from __future__ import annotations

from collections.abc import Iterator

from holmes_ext.patches.megatron.command_line.describe import CommandLine
from holmes_ext.plan.sizes import Sizes, divisors


def refusals(
    said: CommandLine, sizes: Sizes, world: int, partitioned: bool = False
) -> Iterator[str]:
    """Yield a line for each number of the model that its framework cannot divide by the parallel sizes.

    Args:
        sizes: The parallel sizes, including the data-parallel size.
        world: Number of ranks.
        partitioned: Whether holmes decides how many layers each stage gets.
    """
    model = said.model
    if model is None:
        return
    tensor = "--tensor-model-parallel-size", sizes.tensor
    yield from _divides("--num-attention-heads", model.heads, *tensor, 1, world)
    # Query groups are divided among the tensor-parallel ranks, or several of these ranks share a group.
    if model.groups and model.groups % sizes.tensor and sizes.tensor % model.groups:
        yield from _divides("--num-query-groups", model.groups, *tensor, 1, world)
    # Without a split of the layers, Megatron-LM gives each chunk of each stage the same number.
    even = said.framework == "megatron-lm" and not (said.stage_layers or partitioned)
    if even and sizes.pipeline > 1:
        pipeline = "--pipeline-model-parallel-size", sizes.pipeline
        for line in _divides("--num-layers", model.layers, *pipeline, said.virtual, world):
            yield f"{line}; or --holmes-partition balanced gives stages unequal ones"


def _divides(name: str, count: int, flag: str, size: int, chunks: int, world: int) -> Iterator[str]:
    """Yield a line if a number does not divide by a parallel size, with the nearest sizes that fit.

    Args:
        name: The flag of the number.
        flag: The flag of the size.
        chunks: Parts of each rank or stage: the number must divide by size x chunks.
        world: Number of ranks. Only its divisors are possible sizes.
    """
    if count % (size * chunks) == 0:
        return
    fit = [value for value in divisors(world) if count % (value * chunks) == 0]
    below = [value for value in fit if value < size]
    above = [value for value in fit if value > size]
    nearest = " or ".join(map(str, (*below[-1:], *above[:1])))
    what = f"{flag} {size}" + (f" of {chunks} chunks" if chunks > 1 else "")
    yield f"{name} {count} does not divide by {what}" + (
        f"; nearest that do: {nearest}" if nearest else ""
    )
