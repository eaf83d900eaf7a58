"""Measures how long the balanced partition of 128 layers over 64 stages takes, for random costs.

    python benchmarks/stages_speed.py --json FILE [--count 200]

The random cases have up to 8 clusters, in blocks or mixed; layers that are equal or differ by up to 50 %;
free to slow stage links of two rates; reductions of three rates; 8 to 512 micro-batches; and tied
embeddings, overlap or memory limits.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time

from harness import Row, finish, parser

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.partition import partition

LAYERS, STAGES = 128, 64
COLUMNS = LAYERS + 2  # of a row of costs: the embedding, the blocks and the output layer


def case(seed: int) -> StageCosts:
    """Return random costs of a model's layers on 64 pipeline stages.

    The benchmark measures how long it takes to divide the layers among the stages.

    Costs depend on the layer and on the stage that computes it. For each stage, a tuple has one
    number for every layer (COLUMNS: embedding, blocks, output layer). The unit of time is the
    forward pass of a mean block on the fastest GPU. The unit of memory is the state of a block
    (weights, gradients, optimizer).

    Args:
        seed: Seed of the random numbers.
    """
    rng = random.Random(seed)
    clusters = rng.choice((1, 2, 2, 4, 8))
    block_spread = rng.choice((0.0, 0.1, 0.1, 0.5))  # by which blocks differ from the mean
    slowness = [rng.choice((1.0, 1.2, 1.5, 2.0)) for _ in range(clusters)]  # of a cluster's GPUs
    blocks = [rng.uniform(1 - block_spread, 1 + block_spread) for _ in range(LAYERS)]
    forward_s_of = {}  # slowness -> seconds of the forward pass of each layer
    for factor in set(slowness):
        embedding_s = 0.1 * factor
        blocks_s = [factor * block for block in blocks]
        output_s = rng.uniform(0, 2) * factor  # up to two blocks
        forward_s_of[factor] = (embedding_s, *blocks_s, output_s)
    cluster_of = [stage * clusters // STAGES for stage in range(STAGES)]  # by stage
    slowness_of = [slowness[cluster] for cluster in cluster_of]
    if rng.random() < 0.3:
        # Fast and slow GPUs alternate at random. The times of reductions need not fit to them: the
        # partition treats both as independent numbers.
        rng.shuffle(slowness_of)
    fast_link = 0.01
    slow_link = rng.choice((0.01, 0.1, 0.5, 2.0, 5.0))
    stage_links = []  # to the next stage; about a quarter of the links are slow
    for _ in range(STAGES):
        stage_link = fast_link
        if rng.random() < 0.5:
            stage_link = rng.choice((fast_link, slow_link))
        stage_links.append(stage_link)
    reduction = [rng.choice((0.1, 2.0, 10.0)) for _ in range(clusters)]  # of a layer's gradients
    forward_s = [forward_s_of[factor] for factor in slowness_of]  # by stage
    backward_s = [tuple(2 * seconds for seconds in of_layers) for of_layers in forward_s]
    return StageCosts(
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        reduction_s=tuple((reduction[cluster],) * COLUMNS for cluster in cluster_of),
        transfer_s=tuple((stage_link,) * COLUMNS for stage_link in stage_links),
        micro_batches=rng.choice((8, 64, 128, 512)),
        tied_s=rng.choice((0.0, 0.0, 1.0)),  # to reduce the gradient of a tied embedding
        overlap=rng.random() < 0.5,
        state_bytes=(1.0,) * COLUMNS,
        kept_bytes=(0.02,) * COLUMNS,  # activations of a micro-batch
        # A fifth of the cases has a limit of memory: 7 units. On average a stage has two blocks. It
        # may have up to six, whose state takes 6 units and leaves one for activations.
        limit_bytes=(7.0,) * STAGES if rng.random() < 0.2 else (),
    )


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--count", type=int, default=200)
    args = arguments.parse_args()
    seconds = []
    for seed in range(args.count):
        costs = case(seed)
        begin = time.process_time()
        with contextlib.suppress(HolmesError):  # if nothing fits the memory, that is a result, too
            partition("balanced", costs)
        seconds.append(time.process_time() - begin)
    name, spread = f"{LAYERS} layers, {STAGES} stages", (min(seconds), max(seconds))
    rows = [
        Row.of(
            name,
            "slowest partition",
            max(seconds),
            unit="CPU s",
            spread=spread,
            emulated=False,
            target="<= 1.0",
        ),
        Row.of(
            name,
            "median partition",
            statistics.median(seconds),
            unit="CPU s",
            spread=spread,
            emulated=False,
        ),
    ]
    return finish(rows, args.json, f"The balanced partition, {args.count} random cases")


if __name__ == "__main__":
    sys.exit(main())
