"""Tests that the batch may change between steps, with DeepSpeed's pipeline engine in 4 processes on loopback.

Megatron-DeepSpeed calls set_train_batch_size before every step. If the batch grows, the number of
micro-batches changes.

Each case (a sequence of batches) trains twice, from the same weights on the same text: first without holmes
("stock"), and then with holmes. holmes replaces the engine's pipeline schedule by a planned one, which keeps
more micro-batches in flight. For this it must know the shapes of the messages between the stages. When the
shapes are unknown, holmes lets the engine run its own schedule for a step, and records them.

The losses of the two runs must be equal, and only the expected steps may run the engine's own schedule.
"""

import contextlib
import io
import sys
from typing import NamedTuple

import pytest
from ranks import run_cases, seeded

from holmes_ext.patches import Registry
from holmes_ext.patches.deepspeed import stage_links as deepspeed_stage_links
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.samples import examples

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
on_cpu = pytest.importorskip("integration_tests.deepspeed.on_cpu")
overlap = pytest.importorskip("integration_tests.deepspeed.test_overlap")


class Step(NamedTuple):
    """Number of micro-batches and sequence length of one training step."""

    micro_batches: int
    sequence: int = 16  # tokens


class Case(NamedTuple):
    """A training run with batches of different sizes, and the steps expected to use DeepSpeed's schedule."""

    steps: list[Step]
    #: Numbers (from 0) of the steps in which holmes lets the engine run its own schedule, because the shapes
    #: of the messages between the stages are not known yet.
    unplanned_steps: list[int]


class Comparison(NamedTuple):
    """Result of one case on one rank."""

    stock_losses: list[float]  # without holmes
    our_losses: list[float]  # with holmes
    unplanned_steps: list[int]  # numbers of the steps in which the engine ran its own schedule


CASES = {
    "the same in every step": Case([Step(3)] * 4, unplanned_steps=[0]),
    "a batch that grows": Case([Step(1), Step(2), Step(4), Step(4)], unplanned_steps=[0]),
    "a batch that changes and changes back": Case(
        [Step(3), Step(3), Step(2), Step(3)], unplanned_steps=[0]
    ),
    "shorter sequences": Case(
        [Step(3), Step(3), Step(3, sequence=8), Step(3, sequence=8), Step(3)],
        unplanned_steps=[0, 2, 4],
    ),
}


def batches_of(data_rank, steps):
    """Yield the micro-batches of one data-parallel rank as (inputs, labels), which are random bytes.

    The label of each byte is the byte that follows it.
    """
    generator = seeded(data_rank)
    for step in steps:
        for _ in range(step.micro_batches):
            text = torch.randint(
                0, 256, (overlap.MICRO_BATCH, step.sequence + 1), generator=generator
            )
            yield text[:, :-1], text[:, 1:]


def train(steps):
    """Train these steps in this rank, and return the losses.

    As in Megatron-DeepSpeed, the batch size of the engine is set before each step.
    """
    # A pipeline of 2 stages with a tied embedding, and DeepSpeed's default configuration.
    engine = overlap.engine_for(config={}, options={"tied": True})
    data = batches_of(engine.grid.get_data_parallel_rank(), steps)
    losses = []
    sequence_before = steps[0].sequence
    for step in steps:
        samples_of_a_rank = step.micro_batches * overlap.MICRO_BATCH
        engine.set_train_batch_size(samples_of_a_rank * engine.dp_world_size)
        if step.sequence != sequence_before:
            # DeepSpeed requires this call when the shape of the activations changes.
            engine.reset_activation_shape()
        sequence_before = step.sequence
        losses.append(engine.train_batch(data).item())
    return losses


@contextlib.contextmanager
def recorded_schedules(is_planned):
    """Record in each training step whether the engine runs holmes's schedule or DeepSpeed's own.

    At the start of a step, the engine patched by holmes calls one of two methods of Mailbox, the class that
    carries the messages between pipeline stages:
        - begin, if the step runs the schedule that holmes has planned
        - start_recording, if it runs DeepSpeed's own; the shapes of the messages are then recorded

    Args:
        is_planned: A list, to which True (planned) or False (DeepSpeed's own) is appended for each step.
    """

    def recording(method, value):
        """Return the method, changed such that each call appends the value to `is_planned`."""

        def recorded(*args):
            is_planned.append(value)
            return method(*args)

        return recorded

    start_recording, begin = Mailbox.start_recording, Mailbox.begin
    Mailbox.start_recording = recording(start_recording, value=False)
    Mailbox.begin = recording(begin, value=True)
    try:
        yield
    finally:
        Mailbox.start_recording, Mailbox.begin = start_recording, begin


def train_stock_and_ours(rank, names):
    """Train each case twice in this rank: without holmes ("stock"), and with holmes.

    Returns:
        By the name of the case: the losses without holmes, the losses with holmes, and the numbers of the
        steps in which holmes let the engine run its own schedule.
    """
    sys.path.insert(0, str(examples() / "deepspeed_pipeline"))  # has the module `model`
    on_cpu.prepare()
    plan = build_plan(overlap.SITE, Sizes(pipeline=2))
    current = on_cpu.session_of(rank, overlap.SITE, plan)
    results = {}
    for name in names:
        steps = CASES[name].steps
        is_planned = []
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stock = train(steps)
            with recorded_schedules(is_planned):
                registry = Registry(deepspeed_stage_links.PATCHES)
                # The feature with holmes's pipeline schedule; undo() below restores DeepSpeed's code.
                registry.enable(["deepspeed-stage-links"], required=True, disabled=frozenset())
                session.set_active(current)  # from now on, the patched engine uses the plan
                ours = train(steps)
                session.set_active(None)
                registry.undo()
        unplanned_steps = [number for number, planned in enumerate(is_planned) if not planned]
        results[name] = Comparison(stock, ours, unplanned_steps)
    return results


@pytest.fixture(scope="module")
def results():
    return run_cases(train_stock_and_ours, 4, list(CASES), timeout_s=240)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_stocks_and_messages_are_learned_only_where_their_shapes_change(results, name):
    case = CASES[name]
    for results_of_rank in results:
        result = results_of_rank[name]
        assert len(result.our_losses) == len(case.steps)
        assert result.our_losses == result.stock_losses  # exactly
        assert result.unplanned_steps == case.unplanned_steps
