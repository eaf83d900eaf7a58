"""Tests that DeepSpeed keeps as many bytes per parameter as patches/deepspeed/optimizers.py predicts.

Two data-parallel ranks on CPUs train a model of wide linear layers, whose activations are small. At the end
of a backward pass, each rank adds up the memory of all its tensors.
"""

import contextlib
import gc
import io
import itertools

import pytest
from carriers import gloo_only
from ranks import run_cases

from holmes_ext.patches.deepspeed.optimizers import TrainingTypes, optimizer_of, release
from holmes_ext.plan.cost.model import Mode

torch = pytest.importorskip("torch")
deepspeed = pytest.importorskip("deepspeed")
on_cpu = pytest.importorskip("integration_tests.deepspeed.on_cpu")

RANKS = 2  # data-parallel
WIDTH = 128
LAYERS = 32  # many, because the gradients of one or two layers are on their way at any time
STEPS = 2  # the first one creates the moments
MICRO_BATCHES = 2
PIPELINE, NO_PIPELINE = True, False
#: (precision, grad_accum_dtype, ZeRO stage, whether DeepSpeed's pipeline engine runs)
CASES = [
    ("fp32", "", 0, NO_PIPELINE),
    ("bf16", "", 0, NO_PIPELINE),
    ("bf16", "", 0, PIPELINE),
    ("bf16", "fp32", 1, PIPELINE),
    ("bf16", "", 2, NO_PIPELINE),
    ("bf16", "fp32", 2, NO_PIPELINE),
]


def config_of(precision, sums, zero):
    """Return the ds_config of a case."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": zero,
            "reduce_bucket_size": 2 * WIDTH,  # so that buckets need no memory that counts
            "allgather_bucket_size": 2 * WIDTH,
        },
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if sums:
        config["data_types"] = {"grad_accum_dtype": sums}
    return config


def bytes_of_tensors():
    """Return the memory of all tensors of this process, each storage counted once."""
    storages = {}
    for item in gc.get_objects():
        with contextlib.suppress(Exception):  # some objects raise when their type is asked
            if isinstance(item, torch.Tensor):
                # A gradient is an object of Python only once it was asked for.
                tensors = [item] if item.grad is None else [item, item.grad]
                for tensor in tensors:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_per_parameter(case, engines):
    """Train in this rank, and return its bytes per parameter at the end of the last backward pass.

    Args:
        engines: Receives the engine. The engines of earlier cases stay alive, so that their memory can be
            subtracted.
    """
    precision, sums, zero, has_pipeline = case
    gc.collect()
    earlier_bytes = bytes_of_tensors()
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    sample = torch.randn(1, WIDTH, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    batches = itertools.repeat((sample, sample))
    loss_of = torch.nn.functional.mse_loss
    found = []

    def record(*_):
        gc.collect()
        found.append(bytes_of_tensors() - earlier_bytes)

    model = torch.nn.Sequential(*layers)
    if has_pipeline:
        model = deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=loss_of)
    engine, *_ = deepspeed.initialize(model=model, config=config_of(precision, sums, zero))
    engines.append(engine)
    # The first layer's gradient is the last one of a backward pass.
    layers[0].weight.register_post_accumulate_grad_hook(record)
    for _ in range(STEPS):
        if has_pipeline:
            engine.train_batch(data_iter=batches)
            continue
        for _ in range(MICRO_BATCHES):
            loss = loss_of(engine(sample), sample)
            engine.backward(loss)
            engine.step()
    return found[-1] / (LAYERS * WIDTH * WIDTH)


def measured(rank, cases):
    """Return the bytes per parameter of each case in this rank."""
    on_cpu.prepare()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        engines = []
        return {case: bytes_per_parameter(case, engines) for case in cases}


@pytest.fixture(scope="module")
def results():
    return run_cases(measured, RANKS, CASES, timeout_s=240)


@gloo_only
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_per_parameter(results, case):
    precision, sums, zero, has_pipeline = case
    types = TrainingTypes(precision, sums)
    state = optimizer_of(types, Mode(zero, has_pipeline), release()).state
    expected = state.total - state.sharded_bytes + state.sharded_bytes / RANKS
    for results_of_rank in results:
        assert results_of_rank[case] == pytest.approx(expected, rel=0.07)
