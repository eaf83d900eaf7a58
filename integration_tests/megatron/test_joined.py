"""Tests joined jobs of megatron-core with tensor and pipeline parallelism.

The jobs average their weights after each step of plain SGD. This must equal a step of one synchronous job
with as many data-parallel ranks as all jobs have together.
"""

import contextlib
import io
import os
import sys
from functools import partial

import pytest
import torch
from joined_jobs import coordinator, in_threads
from packaging.version import Version
from ranks import run_ranks

from holmes_ext.join import training
from holmes_ext.join.patches import megatron as megatron_joined
from holmes_ext.join.patches import torch as torch_joined
from holmes_ext.options import options_from
from holmes_ext.patches.engine.registry import Registry
from holmes_ext.samples import examples
from integration_tests.jobs import full, megatron_core

pytestmark = pytest.mark.skipif(
    megatron_core() < Version("0.16"), reason="jobs of 0.16 and newer can join"
)
OUTER = "min=2,algorithm=average,every=1,fragments=1,delay=0,compress=off,weight=equal"
STEPS = 3
SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.1}
#: The distributed optimizer supports only Adam. With these options, Adam's steps are 0.1 x the gradient.
AS_SGD = {"adam_beta1": 0.0, "adam_eps": 1e8, "lr": 1e7}
#: Name -> (number of ranks of a job, flags of the example).
CASES = {
    "tensor 2": (2, "--tensor 2"),
    "pipeline 2": (2, "--pipeline 2"),
    "pipeline 2, tied, interleaved": (2, "--pipeline 2 --virtual-pipeline 2 --tied"),
    "tensor 2, data 2, distributed optimizer, overlap": (
        4,
        "--tensor 2 --distributed-optimizer --overlap",
    ),
}


def rank_of(rank, ranks, options, job, join):
    """Train one rank, and return its (pipeline rank, tensor rank) and its weights after the last step.

    Args:
        ranks: Number of ranks of the job.
        options: Flags of the example.
        job: (k, K): the rank reads the k-th of K parts of each step's samples.
        join: "NAME@HOST:PORT", or "" for a job that is not joined.
    """
    torch.set_default_device(None)  # the example moves its model itself
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE="1")
    sys.path.insert(0, str(examples() / "megatron_core"))
    if join:
        training.request(options_from(join=join, outer=OUTER))
        torch_joined.attach()
        Registry(megatron_joined.PATCHES).enable(["joined-megatron"], required=True)
    import train
    from megatron.core import parallel_state

    with contextlib.redirect_stdout(io.StringIO()):
        args, parser = train.parse_args(
            [*options.split(), *"--micro-batch 1 --micro-batches 4 --clip 0".split()]
        )
        train.start_distributed(args, parser)
        original_config = train.OptimizerConfig
        sgd = AS_SGD if args.distributed_optimizer else SGD
        train.OptimizerConfig = lambda **more: original_config(**{**more, **sgd})
        config, models, optimizer = train.build(args)
    job_number, jobs = job
    data_size = parallel_state.get_data_parallel_world_size()
    data_rank = parallel_state.get_data_parallel_rank()
    batches = train.Batches(
        train.load_text(),
        args.sequence,
        args.micro_batch,
        args.micro_batches,
        jobs * data_size,
        job_number * data_size + data_rank,
        args.seed,
    )
    before = [p.detach().clone() for model in models for p in model.parameters()]
    for step in range(STEPS):
        train.train_step(args, batches, step, config, models, optimizer)
    training.end()
    if args.overlap and args.distributed_optimizer:
        models[0].start_param_sync(force_sync=True)
    weights = [p.detach() for model in models for p in model.parameters()]
    changes = [float((new - old).abs().max()) for new, old in zip(weights, before)]
    assert max(changes) > 1e-3, "the model has not learned"
    pipeline_and_tensor_rank = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    flat_weights = torch.cat([weight.flatten() for weight in weights])
    return pipeline_and_tensor_rank, flat_weights.cpu().numpy()


@full
@pytest.mark.parametrize("case", CASES)
def test_averaging_after_each_step_is_one_synchronous_job(case):
    ranks, options = CASES[case]
    expected = dict(run_ranks(rank_of, 2 * ranks, 2 * ranks, options, (0, 1), "", timeout_s=170))
    with coordinator() as server:
        functions = {}
        for number, name in enumerate(("east", "west")):
            arguments = (ranks, options, (number, 2), f"{name}@127.0.0.1:{server.port}")
            functions[name] = partial(run_ranks, rank_of, ranks, *arguments, timeout_s=170)
        results = in_threads(functions)
        assert sum("commit" in event for event in server.told) == STEPS
    for results_of_job in results.values():
        for place, weights in results_of_job:
            torch.testing.assert_close(
                torch.from_numpy(weights), torch.from_numpy(expected[place]), rtol=0, atol=1e-6
            )
