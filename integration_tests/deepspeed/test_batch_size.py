"""DeepSpeed's real pipeline engine, 4 processes on loopback, when the script changes its batch between steps.

Megatron-DeepSpeed calls set_train_batch_size before every step, and a batch that grows changes the number
of micro-batches. Each scene trains twice in the same processes, first stock and then with the plan's
micro-batches in flight, from the same weights on the same text: losses must be equal.
"""

import contextlib
import io
import sys

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

#: name -> (micro-batches and sequence length of each step, steps in the engine's own schedule).
#: A step runs the engine's own schedule only if the shapes of its messages are not known.
SCENES = {
    "the same in every step": ([(3, 16)] * 4, [0]),
    "a batch that grows": ([(1, 16), (2, 16), (4, 16), (4, 16)], [0]),
    "a batch that changes and changes back": ([(3, 16), (3, 16), (2, 16), (3, 16)], [0]),
    "shorter sequences": ([(3, 16), (3, 16), (3, 8), (3, 8), (3, 16)], [0, 2, 4]),
}


def batches_of(data_rank, steps):
    """Yield random bytes of one data-parallel rank."""
    generator = seeded(data_rank)
    for micro_batches, length in steps:
        for _ in range(micro_batches):
            text = torch.randint(0, 256, (overlap.MICRO_BATCH, length + 1), generator=generator)
            yield text[:, :-1], text[:, 1:]


def train(steps):
    """Return the losses of all steps; the batch size is set before each, as Megatron-DeepSpeed does."""
    engine = overlap.engine_for({}, {"tied": True})
    data = batches_of(engine.grid.get_data_parallel_rank(), steps)
    losses, length_before = [], steps[0][1]
    for micro_batches, length in steps:
        engine.set_train_batch_size(micro_batches * overlap.MICRO_BATCH * engine.dp_world_size)
        if length != length_before:
            engine.reset_activation_shape()
        length_before = length
        losses.append(engine.train_batch(data).item())
    return losses


def stock_and_ours(rank, names):
    """Return, by scene, the losses of stock, ours, and the steps that ran the engine's own schedule."""
    sys.path.insert(0, str(examples() / "deepspeed_pipeline"))
    on_cpu.prepare()
    plan = build_plan(overlap.SITE, Sizes(2))
    current = session.Session(Options(), Process(rank, 4, 0, 1, "", 0, "test"), overlap.SITE, plan, rank)
    results, listen, begin = {}, Mailbox.listen, Mailbox.begin
    for name in names:
        steps, _ = SCENES[name]
        planned = []  # of each step, whether it ran the plan's schedule

        def noted(method, value, planned=planned):
            return lambda *args: (planned.append(value), method(*args))[1]

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stock = train(steps)
            Mailbox.listen, Mailbox.begin = noted(listen, False), noted(begin, True)
            registry = Registry(deepspeed_edges.PATCHES)
            registry.enable(["deepspeed-edges"], required=True, disabled=frozenset())
            session.set_active(current)
            ours = train(steps)
            session.set_active(None)
            registry.undo()
            Mailbox.listen, Mailbox.begin = listen, begin
        results[name] = stock, ours, [step for step, is_planned in enumerate(planned) if not is_planned]
    return results


@pytest.fixture(scope="module")
def results():
    return run_scenes(stock_and_ours, 4, list(SCENES), timeout_s=240)


@pytest.mark.parametrize("name", SCENES)
def test_losses_are_stocks_and_messages_are_learned_only_where_their_shapes_change(results, name):
    steps, own_schedule = SCENES[name]
    for of_rank in results:
        stock, ours, unplanned = of_rank[name]
        assert len(ours) == len(steps) and ours == stock
        assert unplanned == own_schedule
