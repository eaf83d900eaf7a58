"""Changes of the batch between steps, with DeepSpeed's real pipeline engine in 4 processes on loopback.

Megatron-DeepSpeed calls set_train_batch_size before every step, and a batch that grows changes the number of
micro-batches. Each scene trains twice in the same processes, from the same weights on the same text: first
stock, and then with the micro-batches in flight that the plan wants. The losses must be equal.
"""

import contextlib
import io
import sys
from typing import NamedTuple

import pytest
from ranks import run_scenes, seeded

from holmes_ext.lab.samples import examples
from holmes_ext.options import Options
from holmes_ext.patches import Registry
from holmes_ext.patches.deepspeed import edges as deepspeed_edges
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.start.launcher import Process

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
on_cpu = pytest.importorskip("integration_tests.deepspeed.on_cpu")
overlap = pytest.importorskip("integration_tests.deepspeed.test_overlap")

class Step(NamedTuple):
    """Batch of one training step."""

    micro_batches: int
    sequence: int  # tokens


class Scene(NamedTuple):
    """Training with a batch that may change."""

    steps: list[Step]
    #: Numbers of the steps that run the engine's own schedule in place of the plan's: when they begin, the
    #: receivers do not know the shapes of the messages.
    unplanned_steps: list[int]


SCENES = {
    "the same in every step": Scene([Step(3, 16)] * 4, unplanned_steps=[0]),
    "a batch that grows": Scene(
        [Step(1, 16), Step(2, 16), Step(4, 16), Step(4, 16)], unplanned_steps=[0]
    ),
    "a batch that changes and changes back": Scene(
        [Step(3, 16), Step(3, 16), Step(2, 16), Step(3, 16)], unplanned_steps=[0]
    ),
    "shorter sequences": Scene(
        [Step(3, 16), Step(3, 16), Step(3, 8), Step(3, 8), Step(3, 16)], unplanned_steps=[0, 2, 4]
    ),
}


def batches_of(data_rank, steps):
    """Yield the micro-batches (random bytes) of one data-parallel rank: inputs, and the bytes that follow."""
    generator = seeded(data_rank)
    for step in steps:
        for _ in range(step.micro_batches):
            text = torch.randint(0, 256, (overlap.MICRO_BATCH, step.sequence + 1), generator=generator)
            yield text[:, :-1], text[:, 1:]


def train(steps):
    """Return the losses of all steps; the batch size is set before each, as Megatron-DeepSpeed does."""
    engine = overlap.engine_for({}, {"tied": True})
    data = batches_of(engine.grid.get_data_parallel_rank(), steps)
    losses = []
    sequence_before = steps[0].sequence
    for step in steps:
        engine.set_train_batch_size(step.micro_batches * overlap.MICRO_BATCH * engine.dp_world_size)
        if step.sequence != sequence_before:
            engine.reset_activation_shape()
        sequence_before = step.sequence
        losses.append(engine.train_batch(data).item())
    return losses


@contextlib.contextmanager
def recorded_schedules(is_planned):
    """Append to the list `is_planned`, for each step, whether the engine ran the plan's schedule.

    The patched engine calls Mailbox.begin for the plan's schedule, and Mailbox.listen for its own, whose
    messages' shapes it records.
    """

    def recording(method, value):
        def recorded(*args):
            is_planned.append(value)
            return method(*args)

        return recorded

    listen, begin = Mailbox.listen, Mailbox.begin
    Mailbox.listen = recording(listen, False)
    Mailbox.begin = recording(begin, True)
    try:
        yield
    finally:
        Mailbox.listen, Mailbox.begin = listen, begin


def stock_and_ours(rank, names):
    """Train the scenes in one rank.

    Returns:
        By scene: stock's losses, holmes's losses, and the numbers of the steps in which holmes ran the
        engine's own schedule.
    """
    sys.path.insert(0, str(examples() / "deepspeed_pipeline"))
    on_cpu.prepare()
    plan = build_plan(overlap.SITE, Sizes(2))
    current = session.Session(Options(), Process(rank, 4, 0, 1, "", 0, "test"), overlap.SITE, plan, rank)
    results = {}
    for name in names:
        steps = SCENES[name].steps
        is_planned = []
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stock = train(steps)
            with recorded_schedules(is_planned):
                registry = Registry(deepspeed_edges.PATCHES)
                registry.enable(["deepspeed-edges"], required=True, disabled=frozenset())
                session.set_active(current)
                ours = train(steps)
                session.set_active(None)
                registry.undo()
        unplanned_steps = [number for number, planned in enumerate(is_planned) if not planned]
        results[name] = stock, ours, unplanned_steps
    return results


@pytest.fixture(scope="module")
def results():
    return run_scenes(stock_and_ours, 4, list(SCENES), timeout_s=240)


@pytest.mark.parametrize("name", SCENES)
def test_losses_are_stocks_and_messages_are_learned_only_where_their_shapes_change(results, name):
    scene = SCENES[name]
    for results_of_rank in results:
        stock, ours, unplanned_steps = results_of_rank[name]
        assert len(ours) == len(scene.steps)
        assert ours == stock
        assert unplanned_steps == scene.unplanned_steps
