"""Layers of each model chunk of a stage, and the parts of a pass between two collectives.

A simulated rank computes one part of its forward or backward pass, then sends or awaits a collective (such as
a gather of weights), and goes on with the next part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.planner.simulate.collective_ops import Operations
from holmes_ext.planner.simulate.events import Op


def blocks_of_chunks(stage_layers: Sequence[int], blocks: int, chunks: int) -> Sequence[int]:
    """Return the number of transformer blocks of every chunk, in the order of the forward pass.

    A chunk is a run of layers on a stage. A stage has a single chunk, or several under an interleaved
    schedule. Example: 8 blocks in 4 chunks without given numbers -> 2, 2, 2, 2.

    Args:
        stage_layers: Blocks of every chunk, as given by the user's setting of this name; () for the
            same number in each. (With a single chunk a stage, these are the blocks of each stage.)
        blocks: Blocks of the model.
        chunks: Number of chunks, of all stages together.

    Raises:
        HolmesError: `stage_layers` is no split of the model's blocks.
    """
    counts = stage_layers or uniform(blocks, chunks)
    if len(counts) != chunks or sum(counts) != blocks or min(counts) < 1:
        given = ",".join(map(str, counts))
        needed = f"they must be {chunks} numbers above 0 whose sum is {blocks} layers"
        raise HolmesError(f"stage_layers {given}: {needed}")
    return counts


def pass_pieces(
    sums: Sequence[float],
    low: int,
    high: int,
    forward: bool,
    needs: Operations,
    launches: Operations,
) -> Iterator[tuple[float, list[Op]]]:
    """Divide a pass into pieces at the layers where weights are awaited or gradients are sent.

    Example: a forward pass over layers 0, 1 and 2 of 1 s each, with launches = {1: [op]}, gives
    (2.0, [op]) and (1.0, []).

    Args:
        sums: Running sums of the seconds over the layers: sums[n] is of the first n layers.
        low: First layer of the pass.
        high: End of its layers (exclusive).
        forward: The pass goes from `low` to `high`; a backward pass goes from `high` to `low`.
        needs: Layer -> operations (of the simulation) before the layer computes.
        launches: Layer -> operations after the layer has computed.

    Yields:
        Seconds of computation of a piece, and the operations between this piece and the next. So the
        needs of a layer are yielded with the piece that ends before the layer.
    """
    # Border n lies between the layers n - 1 and n; sums[n] belongs to it. A forward pass enters layer
    # n at border n and leaves it at border n + 1. A backward pass goes the other way.
    first, last = (low, high) if forward else (high, low)
    piece_start_s = sums[first]
    for layer in sorted({*needs, *launches}, reverse=not forward):
        before, after = (layer, layer + 1) if forward else (layer + 1, layer)
        for ops, border in ((needs.get(layer), before), (launches.get(layer), after)):
            if ops:
                yield abs(sums[border] - piece_start_s), ops
                piece_start_s = sums[border]
    yield abs(sums[last] - piece_start_s), []
