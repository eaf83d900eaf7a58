"""Every operation that megatron-core launches under holmes, on random sites: nothing of it hangs or mixes on
NCCL.

Plain, interleaved, and with the distributed optimizer, with overlapped reductions and gathers or without, two
steps of examples/megatron_core. Losses and gradient norms are stock's.
"""

import contextlib
import gc
import io
import os
import sys

import pytest
from launches import faults

from integration_tests.jobs import ROOT, full
from integration_tests.launches.cases import case, outcome, run_in_batches

pytest.importorskip("megatron.core")

FEATURES = ["megatron-groups", "megatron-layers", "megatron-reduction", "megatron-p2p", "megatron-edges"]
SEEDS = {world: range(1000 * world, 1000 * world + 15) for world in (4, 6, 8)}


def flags(one):
    """Of examples/megatron_core/train.py."""
    rng, stages = one.rng, one.sizes.pipeline
    chunks = rng.choice((1, 2)) if stages > 1 else 1
    size = f"--layers {stages * chunks} --hidden 16 --heads 2 --sequence 8 --micro-batch 1 --steps 2"
    given = f"{size} --micro-batches {2 * stages} --pipeline {stages} --virtual-pipeline {chunks}".split()
    given += ["--distributed-optimizer"] * (rng.random() < 0.5) + ["--overlap"] * (rng.random() < 0.5)
    return given


def losses(one):
    import train
    from megatron.core import parallel_state
    from options import parse_args

    # its all-reduce would make the pipeline's communicator before the schedule does
    train.describe = lambda *args: ""
    entries = train.train(*parse_args(flags(one)))
    parallel_state.destroy_model_parallel()
    gc.collect()
    return [value for entry in entries for value in (entry["loss"], entry["grad_norm"])]


def of_rank(rank, world, seeds):
    """Return for each seed the result under holmes and stock's losses."""
    sys.path[:0] = [str(ROOT / "integration_tests"), str(ROOT / "examples" / "megatron_core")]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    found = []
    for seed in seeds:
        one = case(seed, world)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stock = losses(one)
        found.append((outcome(one, FEATURES, lambda one=one: losses(one)), stock))
    return found


@pytest.mark.parametrize("world", [pytest.param(world, marks=full) for world in (4, 6, 8)])
def test_megatron(world):
    """No order of kernels hangs, and losses are stock's; the cases use all of holmes's features."""
    seeds, used = SEEDS[world], []
    results = run_in_batches(of_rank, world, seeds)
    for number, seed in enumerate(seeds):
        of_ranks = {rank: result[number] for rank, result in enumerate(results)}
        logs = {rank: found.log for rank, (found, _) in of_ranks.items()}
        for bound in (False, True):
            assert faults(logs, bound, blocking=True) == [], (seed, bound, flags(case(seed, world)))
        for found, stock in of_ranks.values():
            assert max(abs(a - b) for a, b in zip(found.losses, stock, strict=True)) < 1e-5, seed
        used.append(frozenset.union(*(found.used for found, _ in of_ranks.values())))
    assert all(sum(name in one for one in used) >= 2 for name in ("overlap", "pairs", "edges")), used
