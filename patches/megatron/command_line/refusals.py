"""Finds parallel sizes that Megatron-LM or Megatron-DeepSpeed will refuse, and suggests valid sizes."""

from __future__ import annotations

from collections.abc import Iterator

from holmes_ext.patches.megatron.command_line.describe import CommandLine
from holmes_ext.plan.cost.model import Mode, accepts
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.sizes import Sizes, divisors


def refusals(
    command_line: CommandLine, sizes: Sizes, world: int, partitioned: bool = False
) -> Iterator[str]:
    """Yield a message for each reason why the framework would refuse the job.

    There are three kinds of reasons:

    - DeepSpeed does not accept the precision, ZeRO stage or offload.
    - Megatron-LM does not train experts with tensor parallelism but without sequence parallelism.
    - The parallel sizes do not divide a count of the model: attention heads, query groups, layers.

    Each message is for the user, and names a way out, such as the nearest valid sizes.

    Args:
        command_line: The job, with its model. If there is no model, nothing is yielded.
        sizes: The parallel sizes, including the data-parallel size.
        world: Number of ranks.
        partitioned: Whether a plan file or --holmes-partition decides how many layers each pipeline
            stage gets. The stages may then have unequal numbers, so the pipeline size need not
            divide the layers.
    """
    model = command_line.model
    if model is None:
        return
    if command_line.refused and not accepts(model, Mode(command_line.zero, sizes.pipeline > 1)):
        yield command_line.refused
    tensor_flag = "--tensor-model-parallel-size"
    is_megatron_lm = command_line.framework == "megatron-lm"
    if is_megatron_lm and model.experts and sizes.tensor > 1 and not model.sequence_parallel:
        yield (
            f"experts with {tensor_flag} {sizes.tensor}: Megatron-LM ends with an error at the first step; "
            "add --sequence-parallel"
        )
    yield from _line_if_indivisible(
        "--num-attention-heads", model.heads, tensor_flag, sizes.tensor, chunks=1, world=world
    )
    # Each tensor-parallel rank has some query groups, or several of these ranks share a group.
    groups = model.groups  # key-value heads; 0: as many as heads
    if groups and groups % sizes.tensor and sizes.tensor % groups:
        yield from _line_if_indivisible(
            "--num-query-groups", groups, tensor_flag, sizes.tensor, chunks=1, world=world
        )
    splits_layers = bool(command_line.stage_layers) or partitioned
    if command_line.framework != "megatron-lm" or splits_layers or sizes.pipeline <= 1:
        return
    # Without a split of the layers, Megatron-LM gives each chunk of each stage the same number.
    lines = _line_if_indivisible(
        command_line.layers_flag,
        model.layers,
        "--pipeline-model-parallel-size",
        sizes.pipeline,
        chunks=command_line.virtual,
        world=world,
    )
    for line in lines:
        yield f"{line}; or --holmes-partition balanced gives stages unequal ones"


def refused_first_rank(plan: Plan) -> str:
    """Return why Megatron-DeepSpeed refuses the order of the nodes; "" if it does not.

    It uses the GPU number rank % GPUs of the node, and asserts that this is the local rank. It is not,
    where a node's first rank is no multiple of its GPUs. This happens only if nodes differ in their GPUs.
    """
    node = plan.misaligned_node()
    if not node:
        return ""
    count = plan.processes_on(node)
    return (
        f"Megatron-DeepSpeed refuses that node {node} with {count} GPUs begins at rank "
        f"{plan.first_rank(node)}, no multiple of {count}; use so many of the narrower nodes that together "
        f"they have a multiple of {count} GPUs"
    )


def _line_if_indivisible(
    count_flag: str, count: int, size_flag: str, size: int, chunks: int, world: int
) -> Iterator[str]:
    """Yield an error message if a count, e.g. of layers, is not divisible by size * chunks.

    The message is for the user, and names the nearest smaller and larger sizes that are valid.
    Example: "--num-layers 10 does not divide by --pipeline-model-parallel-size 4; nearest that do:
    2 or 5".

    Args:
        count_flag: Flag of the count, e.g. "--num-layers".
        count: Number of layers, attention heads or query groups of the model.
        size_flag: Flag of the parallel size, e.g. "--pipeline-model-parallel-size".
        size: The parallel size.
        chunks: Number of chunks of layers on each pipeline stage (interleaved schedule); otherwise
            1.
        world: Number of ranks. Only divisors of it are suggested as sizes.
    """
    if count % (size * chunks) == 0:
        return
    valid_sizes = [value for value in divisors(world) if count % (value * chunks) == 0]
    smaller = [value for value in valid_sizes if value < size]
    larger = [value for value in valid_sizes if value > size]
    nearest_sizes = smaller[-1:] + larger[:1]
    line = f"{count_flag} {count} does not divide by {size_flag} {size}"
    if chunks > 1:
        line += f" of {chunks} chunks"
    if nearest_sizes:
        line += f"; nearest that do: {' or '.join(map(str, nearest_sizes))}"
    yield line
