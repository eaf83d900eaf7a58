"""Tests that the operations that DeepSpeed's engines launch with holmes cannot hang on NCCL.

The operations are recorded while the ranks communicate over gloo (cases.py), and then checked for every order
in which NCCL may run them. The losses must be those without holmes. Random cases:

    pipeline engine    45 clusters; ZeRO 0 and 1, with and without tied layers. Four steps: in the first ones
                       holmes learns the order of gradient buckets and of messages between stages
    plain engine       20 clusters; ZeRO 0 to 3
"""

import os
from typing import NamedTuple

import pytest
from launches import faults

from integration_tests.jobs import full
from integration_tests.launches.cases import CaseResult, case, outcome, run_in_batches

torch = pytest.importorskip("torch")
deepspeed = pytest.importorskip("deepspeed")

WIDTH = 16
LAYERS = 9
STEPS = 4
MICRO_BATCHES = 4  # of each step
FEATURES = [
    "overlap",
    "hierarchical",
    "deepspeed-p2p",
    "deepspeed-grid-check",
    "deepspeed-stage-links",
]
#: Number of processes -> seeds of the cases, which are drawn at random (cases.py).
PIPELINES = {world: range(100 * world, 100 * world + 15) for world in (4, 6, 8)}
ZEROS = {world: range(100 * world + 50, 100 * world + 60) for world in (4, 6)}


def start():
    """Initialize DeepSpeed in this rank."""
    os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1", LOCAL_WORLD_SIZE="1")
    # Compiling this operation would take half a minute, and the tests do not use it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    deepspeed.utils.logger.setLevel(100)


def config(zero):
    """Return DeepSpeed's configuration for a stage of ZeRO."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": None,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": zero,
            "reduce_bucket_size": 400,
            "allgather_bucket_size": 400,
        },
    }


class Layer(torch.nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)


def pipeline_losses(drawn):
    """Train a random case with DeepSpeed's pipeline engine, and return its losses."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    rng = drawn.rng
    is_tied = rng.random() < 0.5
    zero = rng.choice((0, 1))

    def end_layer():
        if is_tied:
            return TiedLayerSpec("ends", Layer, tied_weight_attr="weight")
        return LayerSpec(Layer)

    inner_layers = [LayerSpec(Layer) for _ in range(LAYERS - 2)]
    specs = [end_layer(), *inner_layers, end_layer()]
    with torch.no_grad():
        module = PipelineModule(
            specs,
            num_stages=drawn.sizes.pipeline,
            loss_fn=torch.nn.functional.mse_loss,
            seed_layers=True,
            seed_fn=torch.manual_seed,
            base_seed=7,
            partition_method="uniform",
        )
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=config(zero)
    )
    data = torch.Generator().manual_seed(engine.grid.get_data_parallel_rank())
    batches = iter(
        [(torch.randn(2, WIDTH, generator=data), torch.ones(2, WIDTH)) for _ in range(99)]
    )
    return [engine.train_batch(batches).item() for _ in range(STEPS)]


def zero_losses(drawn):
    """Train a random case with DeepSpeed's engine and ZeRO, and return its losses."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    stage = drawn.seed % 4
    drawn_config = config(stage)
    drawn_config["zero_optimization"]["overlap_comm"] = drawn.rng.random() < 0.5
    engine, *_ = deepspeed.initialize(model=model, config=drawn_config)
    data = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(2 * MICRO_BATCHES):
        loss = (engine(torch.randn(2, WIDTH, generator=data)) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class RankResult(NamedTuple):
    """Result of training one random case on one rank, with holmes and without."""

    #: The losses with holmes, its recorded launches, and the features that it used.
    holmes: CaseResult
    stock_losses: list[float]  # the losses without holmes
    compress: str  # value of --holmes-compress-gradients


def train_cases(rank, world, seeds, train):
    """Train the random case of each seed on this rank, first without and then with holmes.

    Args:
        train: pipeline_losses or zero_losses: trains a case and returns its losses.

    Returns:
        One RankResult for each seed.
    """
    import contextlib
    import io

    start()
    results = []
    for seed in seeds:
        drawn = case(seed, world, pipeline=train is pipeline_losses)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stock_losses = train(drawn)
        # outcome() calls the function with holmes switched on, and records what holmes launches.
        with_holmes = outcome(drawn, FEATURES, lambda drawn=drawn: train(drawn))
        results.append(RankResult(with_holmes, stock_losses, drawn.options.compress_gradients))
    return results


def check(results, seeds):
    """Assert for each random case that its recorded operations cannot hang and that its losses are right.

    Args:
        results: For each rank the list of its RankResults, in the order of the seeds.

    Returns:
        For each case the set of the holmes features that a rank used, such as "overlap" or "a
        hierarchical all-reduce".
    """
    used = []
    for number, seed in enumerate(seeds):
        result_of_rank = {rank: rank_results[number] for rank, rank_results in enumerate(results)}
        logs = {rank: result.holmes.log for rank, result in result_of_rank.items()}
        # faults() lists the ways in which the operations could hang or fail on NCCL.
        # is_bound: NCCL makes a communicator when its group is made, not at its first operation.
        # blocking: an operation begins only after the end of the one before it.
        for is_bound in (False, True):
            assert faults(logs, is_bound, blocking=True) == [], (seed, is_bound)
        for result in result_of_rank.values():
            tolerance = 1e-5 if result.compress == "off" else 2e-2  # bf16 rounds
            differences = [
                abs(a - b) for a, b in zip(result.holmes.losses, result.stock_losses, strict=True)
            ]
            assert max(differences) < tolerance, seed
        used_on_each_rank = [result.holmes.used for result in result_of_rank.values()]
        used.append(frozenset.union(*used_on_each_rank))
    return used


@pytest.mark.parametrize("world", [pytest.param(world, marks=full) for world in (4, 6, 8)])
def test_pipelines(world):
    seeds = PIPELINES[world]
    used = check(run_in_batches(train_cases, world, seeds, pipeline_losses), seeds)
    for feature in ("overlap", "a hierarchical all-reduce", "pairs", "stage_links"):
        assert sum(feature in features for features in used) >= 2, used


@pytest.mark.parametrize("world", [pytest.param(world, marks=full) for world in (4, 6)])
def test_zero(world):
    seeds = ZEROS[world]
    used = check(run_in_batches(train_cases, world, seeds, zero_losses), seeds)
    assert any("a hierarchical all-reduce" in features for features in used), used
