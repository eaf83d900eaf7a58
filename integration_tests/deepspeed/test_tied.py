"""Tests holmes's hierarchical all-reduce of tied weights with DeepSpeed's pipeline engine.

A tied weight (the embedding) is on both pipeline stages, and each stage has 2 data-parallel ranks. Its four
gradients are summed in different orders:

    stock    DeepSpeed without holmes: adds over the stages first, then averages over the data-parallel ranks
    ours     with holmes: averages over the data-parallel ranks first ("a hierarchical all-reduce")

So the losses differ only by rounding. As a proof, a third engine is trained: DeepSpeed without holmes, whose
own collectives are called in the order of "ours" (average_before_adding_stages). Its losses equal those of
"ours" in every bit. All runs are in the same 4 processes on loopback.
"""

import contextlib
import io
import sys
from typing import NamedTuple

import pytest
from carriers import ON_GPUS
from clusters import example
from ranks import run_cases

from holmes_ext.patches import Registry
from holmes_ext.patches.deepspeed import hierarchical as deepspeed_hierarchical
from holmes_ext.patches.deepspeed import reduce as deepspeed_reduce
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.reduce import tied
from holmes_ext.samples import examples

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
on_cpu = pytest.importorskip("integration_tests.deepspeed.on_cpu")
overlap = pytest.importorskip("integration_tests.deepspeed.test_overlap")
SITE = example()
BF16 = {
    "bf16": {"enabled": True},
    "zero_optimization": overlap.ZERO,
    "gradient_clipping": 0.1,
    **overlap.FP32_SUMS,
}
#: name -> (DeepSpeed's configuration, features).
CASES = {
    "fp32": ({}, ["deepspeed-tied"]),
    "fp32, overlap": ({}, ["deepspeed-tied", "overlap"]),
    "bf16 ZeRO 1, clipping, overlap": (BF16, ["deepspeed-tied", "overlap"]),
    "fp32 ZeRO 1": ({"zero_optimization": overlap.ZERO}, ["deepspeed-tied"]),
    "switched off": ({}, ["overlap"]),
}
EMBEDDING = 256 * 32 * 4  # bytes


class Trained(NamedTuple):
    """Result of a training run on one rank."""

    losses: list[float]
    weights: float  # sum of the weights of this rank's stage
    bytes_across: int  # tied gradients sent to the other cluster; 0 over NCCL, or without holmes


class ThreeWays(NamedTuple):
    """Results of three training runs on one rank."""

    stock: Trained  # DeepSpeed without holmes
    ours: Trained  # with holmes
    reordered: Trained  # without holmes, in the order of additions of the hierarchical all-reduce


def train(config):
    """Train in this rank with a tied embedding, and return the losses, weights and bytes sent (Trained)."""
    engine = overlap.engine_for(config, options={"tied": True})
    data = overlap.batches(engine.grid.get_data_parallel_rank(), overlap.STEPS)
    losses = [engine.train_batch(data).item() for _ in range(overlap.STEPS)]
    weights = sum(p.detach().double().sum().item() for p in engine.module.parameters())
    bytes_across = 0
    if not ON_GPUS:  # over NCCL they are not counted
        for _, group in engine.module.get_tied_weights_and_groups():
            reducer = tied.made.get(group)  # holmes's hierarchical all-reduce, None without holmes
            if reducer is not None:
                bytes_across += reducer.reduction.bytes_across
    return Trained(losses, weights, bytes_across)


def average_before_adding_stages(engine):
    """Average the gradients of tied weights over the data-parallel ranks, and then add them over the stages.

    It replaces PipelineEngine._exec_reduce_tied_grads, which adds over the stages only. The engine averages
    over the data-parallel ranks afterwards. This second average changes nothing, since the gradients of these
    ranks are equal by then.
    """
    data_parallel_group = engine.mpu.get_data_parallel_group()
    for weight, stages_group in engine.module.get_tied_weights_and_groups():
        gradient = weight._hp_grad if engine.using_bf16_optimizer else weight.grad  # _hp_grad: fp32
        gradient.div_(engine.dp_world_size)
        torch.distributed.all_reduce(gradient, group=data_parallel_group)
        torch.distributed.all_reduce(gradient, group=stages_group)


@contextlib.contextmanager
def stock_in_the_other_order():
    """Change the order in which DeepSpeed sums the gradients of tied weights, while the context lasts.

    The gradients are averaged over the data-parallel ranks before they are added over the pipeline stages.
    This is the order of holmes's hierarchical all-reduce.
    """
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    # Instruction of a schedule -> method of the engine.
    instructions = PipelineEngine._INSTRUCTION_MAP
    original = instructions[schedule.ReduceTiedGrads]
    instructions[schedule.ReduceTiedGrads] = average_before_adding_stages
    try:
        yield
    finally:
        instructions[schedule.ReduceTiedGrads] = original


def train_in_three_ways(rank, names):
    """Train each case three times in this rank, from the same weights on the same text.

    Returns:
        By the name of the case, the results of train() (ThreeWays) for:
            1. DeepSpeed without holmes
            2. DeepSpeed with holmes, which reduces the gradients of tied weights hierarchically
            3. DeepSpeed without holmes, with the order of additions of the hierarchical all-reduce
    """
    sys.path.insert(0, str(examples() / "deepspeed_pipeline"))  # has the module `model`
    on_cpu.prepare()
    plan = build_plan(SITE, Sizes(pipeline=2))
    current = on_cpu.session_of(rank, SITE, plan)
    results = {}
    for name in names:
        config, features = CASES[name]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stock = train(config)
            with stock_in_the_other_order():
                reordered = train(config)
            registry = Registry((*deepspeed_reduce.PATCHES, *deepspeed_hierarchical.PATCHES))
            registry.enable(features, required=True, disabled=frozenset())  # until undo()
            session.set_active(current)  # from now on, the patched engine uses the plan
            ours = train(config)
            session.set_active(None)
            registry.undo()
        results[name] = ThreeWays(stock, ours, reordered)
    return results


@pytest.fixture(scope="module")
def results():
    return run_cases(train_in_three_ways, 4, list(CASES), timeout_s=240)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_stocks_and_each_rank_sends_its_share(results, name):
    _, features = CASES[name]
    # With another order of additions, a weight in bf16 may round to another number.
    tolerance = 2e-3 if "bf16" in name else 1e-6
    share_bytes = 0
    if not ON_GPUS and "deepspeed-tied" in features:
        # Each of two ranks of a cluster sends a half of the gradient to the other cluster (over gloo).
        share_bytes = EMBEDDING // 2
    for results_of_rank in results:
        stock, ours, _ = results_of_rank[name]
        assert stock.bytes_across == 0, "stock must not have been patched"
        differences = [abs(a - b) for a, b in zip(stock.losses, ours.losses)]
        assert max(differences) <= tolerance, (stock.losses, ours.losses)
        assert abs(stock.weights - ours.weights) <= 10 * tolerance * max(1, abs(stock.weights))
        assert ours.bytes_across == overlap.STEPS * share_bytes


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_the_sum_is_the_only_difference_to_stock(results, name):
    _, features = CASES[name]
    for results_of_rank in results:
        # Training without holmes, with holmes, and without holmes in holmes's order of additions.
        stock, ours, reordered = results_of_rank[name]
        # Otherwise the results would not depend on the order.
        assert stock.weights != reordered.weights
        # The feature "deepspeed-tied" is holmes's hierarchical all-reduce of tied weights.
        expected = reordered if "deepspeed-tied" in features else stock
        assert ours.losses == expected.losses
        assert ours.weights == expected.weights
