"""Tests schedules that split the backward pass, with DeepSpeed's pipeline engine on loopback.

One part computes gradients of the inputs, and a later one gradients of the weights. The losses must be
those of the engine's own schedule.
"""

import contextlib
import io
import sys
from dataclasses import replace

import pytest
from carriers import ON_GPUS
from ranks import run_cases

from holmes_ext.patches import Registry
from holmes_ext.patches.deepspeed import stage_links as deepspeed_stage_links
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.reduce.weight_gradients import WeightGradients
from holmes_ext.samples import examples

pytest.importorskip("deepspeed")
on_cpu = pytest.importorskip("integration_tests.deepspeed.on_cpu")
overlap = pytest.importorskip("integration_tests.deepspeed.test_overlap")
#: Passes of the first and the last stage for three micro-batches:
#:     F: forward    B: whole backward    I: backward for the inputs    W: backward for the weights
#:     g: receive of a gradient is posted (scheduled over NCCL only)
#: The last stage runs F of the next micro-batch before it defers W of the one before.
SCHEDULE = (
    "F0 F1 g0 F2 g1 g2 B0 I1 I2 W1 W2" if ON_GPUS else "F0 F1 F2 B0 I1 I2 W1 W2",
    "F0 F1 I0 F2 I1 W0 I2 W1 W2",
)
#: name -> (passes, DeepSpeed's configuration, the model's options)
CASES = {
    "stock": ((), {}, {}),
    "split": (SCHEDULE, {}, {}),
    "stock tied, clipping": ((), {"gradient_clipping": 0.1}, {"tied": True}),
    "split tied, clipping": (SCHEDULE, {"gradient_clipping": 0.1}, {"tied": True}),
    "stock bf16": ((), {"bf16": {"enabled": True}}, {}),
    "split bf16": (SCHEDULE, {"bf16": {"enabled": True}}, {}),
    "stock ZeRO 1": ((), {"zero_optimization": overlap.ZERO}, {}),
    "refused": (SCHEDULE, {"zero_optimization": overlap.ZERO}, {}),
}


def train_all_cases(rank, names):
    """Train each case in this rank.

    Returns:
        Name of the case -> (losses, number of weight gradients of each deferred pass, text on stderr).
    """
    sys.path.insert(0, str(examples() / "deepspeed_pipeline"))
    on_cpu.prepare()
    results = {}
    original_make = WeightGradients.make
    for name in names:
        passes, config, model = CASES[name]
        plan = build_plan(overlap.SITE, Sizes(2))
        traffic = tuple(replace(traffic, schedule=passes) for traffic in plan.traffic)
        plan = replace(plan, traffic=traffic)
        deferred = []  # number of weight gradients that each pass W computes

        def make(self, micro_batch, deferred=deferred):
            deferred.append(len(self._kept[micro_batch]))
            return original_make(self, micro_batch)

        registry = Registry(deepspeed_stage_links.PATCHES)
        if passes:
            registry.enable(["deepspeed-stage-links"], required=True, disabled=frozenset())
        session.set_active(on_cpu.session_of(rank, overlap.SITE, plan))
        WeightGradients.make = make
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()) as printed,
        ):
            engine = overlap.engine_for(config, model)
            data = overlap.batches(rank % 2, overlap.STEPS)
            losses = [engine.train_batch(data).item() for _ in range(overlap.STEPS)]
        results[name] = (losses, deferred, printed.getvalue())
        session.set_active(None)
        registry.undo()
    return results


@pytest.fixture(scope="module")
def results():
    return run_cases(train_all_cases, 4, list(CASES), timeout_s=240)


@pytest.mark.parametrize("name", ["split", "split tied, clipping", "split bf16"])
def test_losses_are_those_of_the_engines_own_schedule(results, name):
    for results_of_rank in results:
        losses, deferred, _ = results_of_rank[name]
        stock_losses, _, _ = results_of_rank[name.replace("split", "stock")]
        assert losses == stock_losses
        # Three micro-batches a step; the first step uses the engine's own schedule.
        assert len(deferred) == 3 * (overlap.STEPS - 1)
        assert min(deferred) > 0


def test_an_optimizer_that_takes_gradients_itself_keeps_the_engine_s_schedule_and_says_so(results):
    for rank, results_of_rank in enumerate(results):
        losses, deferred, printed = results_of_rank["refused"]
        stock_losses, _, _ = results_of_rank["stock ZeRO 1"]
        assert losses == stock_losses and not deferred
        assert ("own pipeline schedule is used: ZeRO's optimizer takes" in printed) == (rank == 0)
