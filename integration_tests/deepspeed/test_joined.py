"""Tests joined jobs of DeepSpeed's engine: jobs that exchange weights from time to time.

Each job trains with one stage of ZeRO, in float32 or 16 bits. The weights must be those of joined jobs of
plain torch, and a checkpoint must hold the state of the exchange.
"""

import os
import sys
from functools import partial

import pytest
import torch
from joined_jobs import batch, coordinator, in_threads, model_of, plain_sgd
from ranks import run_ranks

from holmes_ext.join import training
from holmes_ext.join.patches import deepspeed as deepspeed_joined
from holmes_ext.join.patches import torch as torch_joined
from holmes_ext.options import options_from
from holmes_ext.patches.engine.registry import Registry
from holmes_ext.samples import examples
from integration_tests.jobs import full

ROWS = 4  # samples of a job in each step
OUTER = "min=2,every=4,fragments=2,delay=1,compress=off,weight=equal"  # --holmes-outer
MUON = f"{OUTER},algorithm=muon"
AVERAGE = "min=2,algorithm=average,every=1,fragments=1,delay=0,compress=off,weight=equal"


def attach(name, port, outer):
    """Join a job of this name to the coordinator on this port, and patch torch and DeepSpeed for it.

    Args:
        outer: Value of --holmes-outer: how the joined jobs exchange their weights.
    """
    training.request(options_from(join=f"{name}@127.0.0.1:{port}", outer=outer))
    torch_joined.attach()
    registry = Registry(deepspeed_joined.PATCHES)
    registry.enable(["joined-deepspeed"], required=True)


def rank_of(
    rank,
    ranks,
    stage,
    dtype,
    job,
    name,
    port,
    steps=9,
    outer=OUTER,
    save=None,
    load=None,
    sgd=False,
):
    """Train one rank of a joined job, and return all weights after the last step.

    Args:
        stage: Stage of ZeRO, or "plain" for torch without DeepSpeed.
        dtype: "fp32", "bf16" or "fp16", which skips the first steps because gradients overflow.
        job: Number of the job, which selects its data.
        steps: Number of optimizer steps that are not skipped.
        save: (folder, step): a checkpoint is saved into the folder after this step.
        load: Folder of a checkpoint with which the training begins.
        sgd: Use plain SGD instead of AdamW.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(ranks), LOCAL_SIZE="1")
    attach(name, port, outer)
    model = model_of()
    if stage == "plain":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(steps):
            inputs, labels = batch(ROWS, job, step)
            optimizer.zero_grad()
            (model(inputs) - labels).square().mean().backward()
            optimizer.step()
        training.end()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    import deepspeed

    operations = deepspeed.ops.__compatible_ops__
    operations.update(dict.fromkeys(operations, False))  # so that nothing is compiled
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # torch supports it on every CPU
    config = {
        "train_micro_batch_size_per_gpu": ROWS // ranks,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 is DeepSpeed's default
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 24, "hysteresis": 1},
    }
    optimizer_class = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if load:
        engine.load_checkpoint(load)
    while (step := engine.global_steps - engine.skipped_steps) < steps:
        inputs, labels = batch(ROWS, job, step)
        inputs, labels = inputs[rank::ranks], labels[rank::ranks]  # this rank's samples
        outputs = engine(inputs.to(next(model.parameters()).dtype))
        engine.backward((outputs.float() - labels).square().mean())
        engine.step()
        if save and engine.global_steps == save[1]:
            engine.save_checkpoint(save[0])
    training.end()
    assert (engine.skipped_steps > 0) == (dtype == "fp16"), engine.skipped_steps
    if stage == 3:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return torch.cat([p.detach().float().flatten() for p in model.parameters()]).tolist()
    return torch.cat([p.detach().float().flatten() for p in model.parameters()]).tolist()


def run(jobs, *, each=None, **more):
    """Run joined jobs at the same time, and return {name of the job: [weights of each rank]}.

    Args:
        jobs: Name of a job -> (number of ranks, stage of ZeRO or "plain", dtype).
        each: Name of a job -> keyword arguments of rank_of() for this job alone.
        more: Keyword arguments of rank_of() for all jobs.
    """
    with coordinator() as server:
        functions = {}
        for number, (name, (ranks, stage, dtype)) in enumerate(jobs.items()):
            keywords = {**more, **(each or {}).get(name, {})}
            functions[name] = partial(
                run_ranks,
                rank_of_with,
                ranks,
                *(ranks, stage, dtype, number, name, server.port, keywords),
            )
        return in_threads(functions)


def rank_of_with(rank, ranks, stage, dtype, job, name, port, more):
    """Call rank_of() with keyword arguments, since run_ranks() passes only positional ones."""
    return rank_of(rank, ranks, stage, dtype, job, name, port, **more)


def nothing(rank):
    """Do nothing: the first call lets the server of ranks import DeepSpeed, which takes long."""


@pytest.fixture(scope="module", autouse=True)
def server_of_ranks():
    run_ranks(nothing, 1, timeout_s=300)


@pytest.fixture(scope="module")
def expected():
    return run({"east": (1, "plain", "fp32"), "west": (1, "plain", "fp32")})


@pytest.mark.parametrize(
    "east, west",
    [
        ((2, 3, "fp32"), (1, 2, "fp32")),
        *(
            pytest.param(
                (ranks_east, stage_east, "fp32"), (ranks_west, stage_west, "fp32"), marks=full
            )
            for ranks_east, stage_east, ranks_west, stage_west in (
                (2, 0, 1, 0),
                (2, 1, 1, 2),
                (2, 2, 1, 1),
                (2, 3, 1, 3),
                (4, 3, 2, 1),
            )
        ),
    ],
)
def test_every_stage_is_what_plain_torch_is(east, west, expected):
    weights_of = run({"east": east, "west": west})
    for name, weights_of_ranks in weights_of.items():
        for weights in weights_of_ranks:
            torch.testing.assert_close(
                torch.tensor(weights), torch.tensor(expected[name][0]), rtol=1e-3, atol=1e-5
            )


@full
@pytest.mark.parametrize("stages", [(0, 1), (3, 2)])
def test_matrices_that_ranks_hold_in_parts_take_the_step_of_the_whole(stages):
    jobs = {"east": (2, stages[0], "fp32"), "west": (1, stages[1], "fp32")}
    plain_jobs = {"east": (1, "plain", "fp32"), "west": (1, "plain", "fp32")}
    weights_of = run(jobs, outer=MUON)
    expected = run(plain_jobs, outer=MUON)
    for name, weights_of_ranks in weights_of.items():
        for weights in weights_of_ranks:
            torch.testing.assert_close(
                torch.tensor(weights), torch.tensor(expected[name][0]), rtol=1e-2, atol=1e-3
            )


@full
@pytest.mark.parametrize(
    "stages, dtype", [((2, 1), "bf16"), ((1, 2), "bf16"), ((3, 3), "bf16"), ((2, 3), "fp16")]
)
def test_sixteen_bits_and_steps_that_are_skipped(stages, dtype, expected):
    weights_of = run({"east": (2, stages[0], dtype), "west": (1, stages[1], dtype)})
    for name, (first, *others) in weights_of.items():
        assert all(weights == first for weights in others)
        torch.testing.assert_close(
            torch.tensor(first), torch.tensor(expected[name][0]), rtol=0.1, atol=0.03
        )


@full
@pytest.mark.parametrize("stage", [2, 3])
def test_outer_state_comes_with_the_checkpoint(stage, tmp_path):
    """Both jobs stop after step 7, during an exchange, and resume with the same weights."""
    jobs = {"east": (2, stage, "fp32"), "west": (1, 1, "fp32")}
    straight = run(jobs, steps=12)
    run(jobs, steps=7, each={name: {"save": (str(tmp_path / name), 7)} for name in jobs})
    resumed = run(jobs, steps=12, each={name: {"load": str(tmp_path / name)} for name in jobs})
    assert resumed == straight


@full
@pytest.mark.parametrize("stages", [(1, 2), (3, 0)])
def test_averaging_after_each_step_is_one_synchronous_job(stages):
    """With plain SGD, the mean of the jobs' weights is a step of the mean of their gradients."""
    jobs = {"east": (2, stages[0], "fp32"), "west": (2, stages[1], "fp32")}
    weights_of = run(jobs, outer=AVERAGE, steps=6, sgd=True)
    [expected] = run_ranks(plain_sgd, 1, ROWS, 6)
    for weights_of_ranks in weights_of.values():
        for weights in weights_of_ranks:
            torch.testing.assert_close(torch.tensor(weights), expected, rtol=0, atol=1e-6)


def pipeline_rank(rank, ranks, job, name, port, config):
    """Train one rank of DeepSpeed's pipeline engine, and return (stage, weights of the stage).

    Args:
        job: Number of the joined job, whose data this rank reads. None: the rank belongs to a single job that
            is not joined, and each of its data-parallel ranks reads the data of one joined job.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    sys.path.insert(0, str(examples() / "deepspeed_pipeline"))
    if job is not None:
        attach(name, port, AVERAGE)
    from integration_tests.deepspeed import on_cpu, test_overlap

    on_cpu.prepare()
    sgd = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
    }
    engine = test_overlap.engine_for({**sgd, **config}, {"tied": True})
    data_rank = engine.grid.get_data_parallel_rank() if job is None else job
    data = test_overlap.batches(data_rank, 3)
    losses = [engine.train_batch(data).item() for _ in range(3)]
    training.end()
    assert losses[0] - losses[-1] > 1e-3
    weights = torch.cat([p.detach().flatten() for p in engine.parameters()])
    return engine.grid.get_pipe_parallel_rank(), weights.tolist()


@full
@pytest.mark.parametrize("zero", [0, 1])
def test_a_pipeline_s_averages_are_one_synchronous_job_s_steps(zero):
    """Jobs of two stages with a tied embedding have the weights of one larger job."""
    config = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000}} if zero else {}
    expected = dict(run_ranks(pipeline_rank, 4, 4, None, "", 0, config, timeout_s=170))
    with coordinator() as server:
        functions = {}
        for number, name in enumerate(("east", "west")):
            arguments = (2, number, name, server.port, config)
            functions[name] = partial(run_ranks, pipeline_rank, 2, *arguments, timeout_s=170)
        results = in_threads(functions)
    for results_of_job in results.values():
        for stage, weights in results_of_job:
            torch.testing.assert_close(
                torch.tensor(weights), torch.tensor(expected[stage]), rtol=0, atol=1e-6
            )
