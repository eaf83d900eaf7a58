"""Tests that holmes counts training steps right if a training step has several optimizer.step() calls.

DeepSpeed's ZeRO calls step() once for each parameter group of one optimizer. megatron-core and torchtitan
have an optimizer for each part of the model. Holmes counts with a hook that torch calls after each
optimizer.step().
"""

import pytest

from holmes_ext.runtime.measure.clock import StepCounter
from holmes_ext.runtime.watch import start_stop
from holmes_ext.runtime.watch.as_planned import COMPARED_STEP

torch = pytest.importorskip("torch")
hooks = pytest.importorskip("torch.optim.optimizer")


def optimizer_of(groups=1):
    """Return an SGD optimizer with `groups` parameter groups of one parameter each, with gradients."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(groups)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=0.1)


def step_group_by_group(optimizer):
    """Call optimizer.step() once for each parameter group, with only that group in the optimizer.

    DeepSpeed's ZeRO optimizer does so in DeepSpeedZeroOptimizer._optimizer_step.
    """
    all_groups = optimizer.param_groups
    for group in all_groups:
        optimizer.param_groups = [group]
        optimizer.step()
    optimizer.param_groups = all_groups


@pytest.fixture
def counted():
    """Yield a list that gets True or False at each optimizer.step() of the test.

    It gets True if StepCounter counts the call as a training step.
    """
    counter = StepCounter()
    results = []

    def after_optimizer_step(optimizer, *_):
        results.append(counter.ends_step(optimizer))

    hook = hooks.register_optimizer_step_post_hook(after_optimizer_step)  # for all optimizers
    yield results
    hook.remove()


def test_an_optimizer_that_is_stepped_for_each_of_its_groups(counted):
    optimizer = optimizer_of(groups=2)
    for _ in range(3):
        step_group_by_group(optimizer)
    assert counted == [True, False] * 3


def test_optimizers_of_several_parts_of_a_model(counted):
    parts = [optimizer_of() for _ in range(3)]
    for _ in range(2):
        for optimizer in parts:
            optimizer.step()
    assert counted == [True, False, False] * 2


def test_an_optimizer_that_steps_more_often_takes_over(counted):
    rare, often = optimizer_of(), optimizer_of()
    rare.step()
    for _ in range(3):
        often.step()
    assert counted == [True, False, True, True]


def test_loaded_state_and_a_model_that_is_gone_change_nothing(counted):
    optimizer = optimizer_of()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    del optimizer
    optimizer_of().step()
    assert counted == [True, True, True]


def test_the_plan_is_compared_after_whole_steps(monkeypatch):
    """A training step with two optimizer.step() calls is one step for the comparison of a job with its plan.

    After COMPARED_STEP training steps, holmes compares what the job did with its plan.
    """
    calls = []  # one entry for each call of Comparison.step_done

    class FakeComparison:
        def __init__(self, current, put):
            pass

        def step_done(self):
            calls.append("step_done")

    monkeypatch.setattr(start_stop, "Comparison", FakeComparison)
    optimizer = optimizer_of(groups=2)
    # Makes a Comparison, and calls its step_done after each training step, by a hook on optimizers.
    no_session = None  # FakeComparison does not use it
    start_stop.compare_with_plan(no_session)
    try:
        for _ in range(COMPARED_STEP):
            step_group_by_group(optimizer)  # one training step, two calls of optimizer.step()
    finally:
        start_stop.unhook_optimizers()
    assert len(calls) == COMPARED_STEP
