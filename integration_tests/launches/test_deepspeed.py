"""Every operation that DeepSpeed's engines launch under holmes, on random sites: nothing of it hangs or mixes
on NCCL.

The pipeline engine on 45 sites (ZeRO 0 and 1, tied layers or none, overlap, two levels, pairs of stages with
groups of their own, receives posted in advance), four steps: the first learns the order of the buckets, two
which messages come. The plain engine on 20, ZeRO 0 to 3. Losses are stock's.
"""

import os

import pytest
from launches import faults

from integration_tests.jobs import full
from integration_tests.launches.cases import case, outcome, run_in_batches

torch = pytest.importorskip("torch")
deepspeed = pytest.importorskip("deepspeed")

WIDTH, LAYERS, STEPS, MICRO_BATCHES = 16, 9, 4, 4
FEATURES = ["overlap", "two-level", "deepspeed-p2p", "deepspeed-grid-check", "deepspeed-edges"]
#: Number of processes -> seeds of the cases, which are drawn at random (cases.py).
PIPELINES = {world: range(100 * world, 100 * world + 15) for world in (4, 6, 8)}
ZEROS = {world: range(100 * world + 50, 100 * world + 60) for world in (4, 6)}


def start():
    os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1", LOCAL_WORLD_SIZE="1")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # half a minute of compiling, and not used
    deepspeed.init_distributed()
    deepspeed.utils.logger.setLevel(100)


def config(zero):
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": None,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 400, "allgather_bucket_size": 400},
    }  # fmt: skip


class Layer(torch.nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)


def pipeline_losses(one):
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    rng = one.rng
    tied, zero = rng.random() < 0.5, rng.choice((0, 1))
    kind = (lambda: TiedLayerSpec("ends", Layer,
                                  tied_weight_attr="weight")) if tied else (lambda: LayerSpec(Layer))
    specs = [kind(), *(LayerSpec(Layer) for _ in range(LAYERS - 2)), kind()]
    with torch.no_grad():
        module = PipelineModule(specs, num_stages=one.sizes.pipeline, loss_fn=torch.nn.functional.mse_loss,
                                seed_layers=True, seed_fn=torch.manual_seed, base_seed=7,
                                partition_method="uniform")  # fmt: skip
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()),
                                      config=config(zero))
    data = torch.Generator().manual_seed(engine.grid.get_data_parallel_rank())
    batches = iter([(torch.randn(2, WIDTH, generator=data), torch.ones(2, WIDTH)) for _ in range(99)])
    return [engine.train_batch(batches).item() for _ in range(STEPS)]


def zero_losses(one):
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    zero = {"stage": one.seed % 4, "overlap_comm": one.rng.random() < 0.5}
    given = config(one.seed % 4)
    given["zero_optimization"] |= zero
    engine, *_ = deepspeed.initialize(model=model, config=given)
    data = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses = []
    for _ in range(2 * MICRO_BATCHES):
        loss = (engine(torch.randn(2, WIDTH, generator=data)) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def of_rank(rank, world, seeds, losses):
    """Return for each seed the result under holmes, stock's losses, and the compression that holmes used."""
    import contextlib
    import io

    start()
    found = []
    for seed in seeds:
        one = case(seed, world, pipeline=losses is pipeline_losses)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stock = losses(one)
        found.append((outcome(one, FEATURES, lambda one=one: losses(one)), stock, one.options.compress))
    return found


def check(results, seeds):
    """Assert that no order of kernels hangs and that losses are stock's; return what each case used.

    Each case's set names reductions and messages that it used, such as "two levels" or "pairs".
    """
    used = []
    for number, seed in enumerate(seeds):
        of_ranks = {rank: result[number] for rank, result in enumerate(results)}
        logs = {rank: found.log for rank, (found, *_) in of_ranks.items()}
        for bound in (False, True):
            assert faults(logs, bound, blocking=True) == [], (seed, bound)
        for found, stock, compress in of_ranks.values():
            tolerance = 1e-5 if compress == "off" else 2e-2
            assert max(abs(a - b) for a, b in zip(found.losses, stock, strict=True)) < tolerance, seed
        used.append(frozenset.union(*(found.used for found, *_ in of_ranks.values())))
    return used


@pytest.mark.parametrize("world", [pytest.param(world, marks=full) for world in (4, 6, 8)])
def test_pipelines(world):
    seeds = PIPELINES[world]
    used = check(run_in_batches(of_rank, world, seeds, pipeline_losses), seeds)
    assert all(sum(name in one for one in used) >= 2
               for name in ("overlap", "two levels", "pairs", "edges")), used


@pytest.mark.parametrize("world", [pytest.param(world, marks=full) for world in (4, 6)])
def test_zero(world):
    seeds = ZEROS[world]
    used = check(run_in_batches(of_rank, world, seeds, zero_losses), seeds)
    assert any("two levels" in one for one in used), used
