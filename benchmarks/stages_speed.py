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


def case(seed: int) -> StageCosts:
    """Return the random costs of a case; the seconds have an arbitrary unit."""
    rng = random.Random(seed)
    # Clusters, which differ in the speed of their GPUs, and how much layers differ from each other.
    kinds, spread = rng.choice((1, 2, 2, 4, 8)), rng.choice((0.0, 0.1, 0.1, 0.5))
    factors = [rng.choice((1.0, 1.2, 1.5, 2.0)) for _ in range(kinds)]
    blocks = [rng.uniform(1 - spread, 1 + spread) for _ in range(LAYERS)]
    rows = {
        factor: (0.1 * factor, *(factor * block for block in blocks), rng.uniform(0, 2) * factor)
        for factor in set(factors)
    }
    factor_of = [factors[stage * kinds // STAGES] for stage in range(STAGES)]  # by stage
    if rng.random() < 0.3:  # stages of a cluster are no block
        rng.shuffle(factor_of)
    slow = rng.choice((0.01, 0.1, 0.5, 2.0, 5.0))
    stage_links = [rng.choice((0.01, slow)) if rng.random() < 0.5 else 0.01 for _ in range(STAGES)]
    reduction = [rng.choice((0.1, 2.0, 10.0)) for _ in range(kinds)]
    return StageCosts(
        forward_s=tuple(rows[factor] for factor in factor_of),
        backward_s=tuple(tuple(2 * seconds for seconds in rows[factor]) for factor in factor_of),
        reduction_s=tuple(
            (reduction[stage * kinds // STAGES],) * (LAYERS + 2) for stage in range(STAGES)
        ),
        transfer_s=tuple((stage_link,) * (LAYERS + 2) for stage_link in stage_links),
        micro_batches=rng.choice((8, 64, 128, 512)),
        tied_s=rng.choice((0.0, 0.0, 1.0)),
        overlap=rng.random() < 0.5,
        state_bytes=(1.0,) * (LAYERS + 2),
        kept_bytes=(0.02,) * (LAYERS + 2),
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
