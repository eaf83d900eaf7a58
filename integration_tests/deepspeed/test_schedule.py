"""Backward passes in two under DeepSpeed's real pipeline engine, on loopback: losses are those of its own
schedule."""

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
#: Of three micro-batches: the last stage begins one before the gradient of the one before, and puts weights
#: off. NCCL is told when gradients' receives are posted, too.
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


def all_cases(rank, names):
    """Losses, of each case; the weights' gradients that were put off; what was told."""
    sys.path.insert(0, str(examples() / "deepspeed_pipeline"))
    on_cpu.prepare()
    found, make = {}, WeightGradients.make
    for name in names:
        passes, config, model = CASES[name]
        plan, late = build_plan(overlap.SITE, Sizes(2)), []
        plan = replace(plan, traffic=tuple(replace(one, schedule=passes) for one in plan.traffic))
        registry = Registry(deepspeed_stage_links.PATCHES)
        if passes:
            registry.enable(["deepspeed-stage-links"], required=True, disabled=frozenset())
        session.set_active(on_cpu.session_of(rank, overlap.SITE, plan))
        WeightGradients.make = lambda self, one, late=late: (
            late.append(len(self._kept[one])) or make(self, one)
        )
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()) as told,
        ):
            engine = overlap.engine_for(config, model)
            data = overlap.batches(rank % 2, overlap.STEPS)
            found[name] = (
                [engine.train_batch(data).item() for _ in range(overlap.STEPS)],
                late,
                told.getvalue(),
            )
        session.set_active(None)
        registry.undo()
    return found


@pytest.fixture(scope="module")
def results():
    return run_cases(all_cases, 4, list(CASES), timeout_s=240)


@pytest.mark.parametrize("name", ["split", "split tied, clipping", "split bf16"])
def test_losses_are_those_of_the_engines_own_schedule(results, name):
    for found in results:
        losses, late, _ = found[name]
        assert losses == found[name.replace("split", "stock")][0]
        assert (
            len(late) == 3 * (overlap.STEPS - 1) and min(late) > 0
        )  # the first step is the engine's own


def test_an_optimizer_that_takes_gradients_itself_keeps_the_engine_s_schedule_and_says_so(results):
    for rank, found in enumerate(results):
        losses, late, told = found["refused"]
        assert losses == found["stock ZeRO 1"][0] and not late
        assert ("own pipeline schedule is used: ZeRO's optimizer takes" in told) == (rank == 0)
