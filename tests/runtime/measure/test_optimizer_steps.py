"""Training steps counted by optimizer steps: real torch optimizers, stepped as frameworks do it."""

import pytest

from holmes_ext.runtime.measure.optimizer_steps import StepCounter
from holmes_ext.runtime.watch import start_stop
from holmes_ext.runtime.watch.as_planned import STEPS

torch = pytest.importorskip("torch")
hooks = pytest.importorskip("torch.optim.optimizer")


def optimizer_of(groups=1):
    """An optimizer with parameter groups of one parameter each."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(groups)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=0.1)


def step_group_by_group(optimizer):
    """As DeepSpeedZeroOptimizer._optimizer_step does it."""
    groups = optimizer.param_groups
    for group in groups:
        optimizer.param_groups = [group]
        optimizer.step()
    optimizer.param_groups = groups


@pytest.fixture
def ends():
    """A list of what a StepCounter says of each optimizer step."""
    counter, found = StepCounter(), []
    hook = hooks.register_optimizer_step_post_hook(
        lambda optimizer, *_: found.append(counter.ends_step(optimizer)))
    yield found
    hook.remove()


def test_an_optimizer_that_is_stepped_for_each_of_its_groups(ends):
    optimizer = optimizer_of(groups=2)
    for _ in range(3):
        step_group_by_group(optimizer)
    assert ends == [True, False] * 3


def test_optimizers_of_several_parts_of_a_model(ends):
    parts = [optimizer_of() for _ in range(3)]
    for _ in range(2):
        for optimizer in parts:
            optimizer.step()
    assert ends == [True, False, False] * 2


def test_an_optimizer_that_steps_more_often_takes_over(ends):
    rare, often = optimizer_of(), optimizer_of()
    rare.step()
    for _ in range(3):
        often.step()
    assert ends == [True, False, True, True]


def test_loaded_state_and_a_model_that_is_gone_change_nothing(ends):
    optimizer = optimizer_of()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    del optimizer
    optimizer_of().step()
    assert ends == [True, True, True]


def test_the_plan_is_compared_after_whole_steps(monkeypatch):
    """Not after the first one, where ZeRO steps its optimizer for each of two groups."""
    compared = []
    monkeypatch.setattr(start_stop, "Comparison", lambda current, put: type(
        "Comparison", (), {"step_done": lambda self: compared.append("step")})())
    optimizer = optimizer_of(groups=2)
    start_stop.compare_with_plan(None)
    try:
        for _ in range(STEPS):
            step_group_by_group(optimizer)
    finally:
        start_stop.unhook_optimizers()
    assert len(compared) == STEPS
