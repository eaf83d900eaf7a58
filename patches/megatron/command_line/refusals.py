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
    """Yield a message for each reason why Megatron-LM or Megatron-DeepSpeed would refuse the job.

    The reasons are:

    - a precision, ZeRO stage or offload that the framework does not accept
    - experts with tensor parallelism, but without sequence parallelism (Megatron-LM)
    - a number of attention heads or query groups that the tensor-parallel size does not divide
    - a number of layers that cannot be divided evenly among the pipeline stages and their chunks.
      This counts only for Megatron-LM, and only if all stages shall have equally many layers.

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

    # `refused` is a message about the precision, ZeRO stage and offload of the command line, "" if the
    # framework accepts them. `sizes` may have a pipeline where the command line has none, or the other
    # way round, so the message is yielded only if these sizes are refused too.
    if command_line.refused and not accepts(model, Mode(command_line.zero, sizes.pipeline > 1)):
        yield command_line.refused
    tensor_flag = "--tensor-model-parallel-size"
    is_megatron_lm = command_line.framework == "megatron-lm"
    if is_megatron_lm and model.experts and sizes.tensor > 1 and not model.sequence_parallel:
        yield (
            f"experts with {tensor_flag} {sizes.tensor}: Megatron-LM ends with an error at the first step; "
            "add --sequence-parallel"
        )

    # chunks=1: only layers are divided into chunks.
    yield from _line_if_indivisible(
        "--num-attention-heads", model.heads, tensor_flag, sizes.tensor, chunks=1, world=world
    )

    # Each tensor-parallel rank has some query groups, or several of these ranks share a group.
    groups = model.groups  # key-value heads; 0: as many as heads
    if groups and groups % sizes.tensor and sizes.tensor % groups:
        yield from _line_if_indivisible(
            "--num-query-groups", groups, tensor_flag, sizes.tensor, chunks=1, world=world
        )
    may_be_unequal = bool(command_line.stage_layers) or partitioned
    if not is_megatron_lm or may_be_unequal or sizes.pipeline <= 1:
        return

    # Unless the layers of each stage are given, Megatron-LM divides them evenly: every stage has
    # `virtual` chunks (1 without the interleaved schedule), and every chunk has equally many layers.
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

    Each process uses the GPU with the number `rank % GPUs of its node`, and asserts that this number is
    its local rank. The assertion fails on a node whose first rank is no multiple of its GPUs. Example: a
    node of 4 GPUs has the ranks 0 to 3, and a node of 8 GPUs follows. Its first rank, 4, has local rank 0,
    but 4 % 8 is 4.
    """
    node = plan.misaligned_node()
    if not node:
        return ""
    count = plan.processes_on(node)
    # Two nodes of 4 GPUs before the node of 8 would help: it then begins at rank 8.
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
