"""Checks that training steps are counted correctly when torch's optimizers step as in each framework."""

import pytest

from holmes_ext.runtime.measure.optimizer_steps import StepCounter
from holmes_ext.runtime.watch import start_stop
from holmes_ext.runtime.watch.as_planned import COMPARED_STEP

torch = pytest.importorskip("torch")
hooks = pytest.importorskip("torch.optim.optimizer")


def optimizer_of(groups=1):
    """Return an optimizer whose parameter groups contain one parameter each."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(groups)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=0.1)


def step_group_by_group(optimizer):
    """Step the optimizer once for each group, as DeepSpeedZeroOptimizer._optimizer_step does."""
    groups = optimizer.param_groups
    for group in groups:
        optimizer.param_groups = [group]
        optimizer.step()
    optimizer.param_groups = groups


@pytest.fixture
def counted():
    """List of whether StepCounter counts each optimizer step of the test as a training step."""
    counter = StepCounter()
    results = []

    def after_step(optimizer, *_):
        results.append(counter.ends_step(optimizer))

    hook = hooks.register_optimizer_step_post_hook(after_step)
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
    """The comparison counts a training step as one, although its optimizer steps for each of two groups."""
    training_steps = []

    class FakeComparison:
        def __init__(self, current, put):
            pass

        def step_done(self):
            training_steps.append("step")

    monkeypatch.setattr(start_stop, "Comparison", FakeComparison)
    optimizer = optimizer_of(groups=2)
    start_stop.compare_with_plan(None)
    try:
        for _ in range(COMPARED_STEP):
            step_group_by_group(optimizer)
    finally:
        start_stop.unhook_optimizers()
    assert len(training_steps) == COMPARED_STEP
