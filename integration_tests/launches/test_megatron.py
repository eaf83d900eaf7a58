"""Tests that the operations that megatron-core launches with holmes cannot hang on NCCL.

Each random case trains two steps of examples/megatron_core for a random cluster. Its schedule is 1F1B or
interleaved, and it may have the distributed optimizer and overlapped reductions. The operations are recorded
while the ranks communicate over gloo (cases.py), and then checked for every order in which NCCL may run them.
Losses and gradient norms must be those of the same case without holmes.
"""

import contextlib
import gc
import io
import os
import sys
from typing import NamedTuple

import pytest
from launches import faults

from integration_tests.jobs import ROOT, full
from integration_tests.launches.cases import CaseResult, case, outcome, run_in_batches

pytest.importorskip("megatron.core")

FEATURES = [
    "megatron-groups",
    "megatron-layers",
    "megatron-reduction",
    "megatron-p2p",
    "megatron-stage-links",
]
SEEDS = {world: range(1000 * world, 1000 * world + 15) for world in (4, 6, 8)}


def flags(drawn):
    """Return flags of examples/megatron_core/train.py for a random case."""
    rng = drawn.rng
    stages = drawn.sizes.pipeline
    chunks = rng.choice((1, 2)) if stages > 1 else 1
    size = (
        f"--layers {stages * chunks} --hidden 16 --heads 2 --sequence 8 --micro-batch 1 --steps 2"
    )
    split = f"--micro-batches {2 * stages} --pipeline {stages} --virtual-pipeline {chunks}"
    words = [*size.split(), *split.split()]
    if rng.random() < 0.5:
        words.append("--distributed-optimizer")
    if rng.random() < 0.5:
        words.append("--overlap")
    return words


def losses(drawn):
    """Train a random case, and return the loss and the gradient norm of each step."""
    import train
    from megatron.core import parallel_state
    from options import parse_args

    # The all-reduce in this function would make the pipeline's communicator before the schedule does.
    train.describe = lambda *args: ""
    entries = train.train(*parse_args(flags(drawn)))
    parallel_state.destroy_model_parallel()
    gc.collect()
    return [value for entry in entries for value in (entry["loss"], entry["grad_norm"])]


class RankResult(NamedTuple):
    """Result of training one random case on one rank, with holmes and without."""

    #: The losses with holmes, its recorded launches, and the features that it used.
    holmes: CaseResult
    stock_losses: list[float]  # the losses and gradient norms without holmes


def train_cases(rank, world, seeds):
    """Train the random case of each seed on this rank, first without and then with holmes.

    Returns:
        One RankResult for each seed.
    """
    sys.path[:0] = [str(ROOT / "integration_tests"), str(ROOT / "examples" / "megatron_core")]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    results = []
    for seed in seeds:
        drawn = case(seed, world)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stock_losses = losses(drawn)
        # outcome() calls the function with holmes switched on, and records what holmes launches.
        with_holmes = outcome(drawn, FEATURES, lambda drawn=drawn: losses(drawn))
        results.append(RankResult(with_holmes, stock_losses))
    return results


@pytest.mark.parametrize("world", [pytest.param(world, marks=full) for world in (4, 6, 8)])
def test_megatron(world):
    """The recorded operations of each random case cannot hang on NCCL, and holmes does not change the losses.

    At least two of the cases use each of the features: overlapped reductions, process groups for pairs of
    stages, and early receives of messages between stages ("stage links").
    """
    seeds = SEEDS[world]
    results = run_in_batches(train_cases, world, seeds)  # rank -> a RankResult for each seed
    used = []  # for each case the set of the features that it used
    for number, seed in enumerate(seeds):
        result_of_rank = {rank: rank_results[number] for rank, rank_results in enumerate(results)}
        logs = {rank: result.holmes.log for rank, result in result_of_rank.items()}
        # faults() lists the ways in which the operations could hang or fail on NCCL.
        # is_bound: NCCL makes a communicator when its group is made, not at its first operation.
        # blocking: an operation begins only after the end of the one before it.
        for is_bound in (False, True):
            assert faults(logs, is_bound, blocking=True) == [], (
                seed,
                is_bound,
                flags(case(seed, world)),
            )
        for result in result_of_rank.values():
            differences = [
                abs(a - b) for a, b in zip(result.holmes.losses, result.stock_losses, strict=True)
            ]
            assert max(differences) < 1e-5, seed
        used_on_each_rank = [result.holmes.used for result in result_of_rank.values()]
        used.append(frozenset.union(*used_on_each_rank))
    for feature in ("overlap", "pairs", "stage_links"):
        cases_with_feature = [features for features in used if feature in features]
        assert len(cases_with_feature) >= 2, used
