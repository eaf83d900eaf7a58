"""The schedule with more micro-batches in flight: what it tells the engine, and when kept messages are let
go."""

import random
from collections import deque
from types import SimpleNamespace

import pytest

from holmes_ext.patches import Registry
from holmes_ext.patches.deepspeed import edges
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.receive_order import ReceiveOrder

schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")


class Letting:
    """A mailbox that notes what it may let go."""

    def __init__(self):
        self.unit, self.let_go = ("", 0), []

    def passed(self, kind, index):
        assert (kind, index) == self.unit

    def arrived(self, kind, index):
        self.let_go.append((self.unit, kind, index))


def steps(held, micro_batches, stage):
    box = Letting()
    engine = SimpleNamespace(loss=None, grad_layer=None)
    stock = schedule.TrainSchedule(micro_batches=micro_batches, stages=len(held), stage_id=stage)
    made = edges._schedule_class()(stock, ReceiveOrder(held), engine, box)
    return made, list(made.steps()), box


def computed(commands):
    kinds = (schedule.ForwardPass, schedule.BackwardPass)
    return [(type(cmd).__name__, cmd.buffer_id) for step in commands for cmd in step
            if isinstance(cmd, kinds)]


@pytest.mark.parametrize("stages, micro_batches", [(2, 4), (3, 5), (4, 8), (4, 2)])
def test_1f1bs_own_number_is_the_engines_order(stages, micro_batches):
    for stage in range(stages):
        stock = schedule.TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)
        made, commands, _ = steps(tuple(range(stages, 0, -1)), micro_batches, stage)
        assert made.num_pipe_buffers() == stock.num_pipe_buffers()
        assert computed(commands) == computed(stock.steps())
        names = [type(cmd).__name__ for cmd in commands[-1]]
        assert names[-3:] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]


@pytest.mark.parametrize("seed", range(30))
def test_sends_meet_receives_and_buffers_suffice(seed):
    """All stages by their commands, messages in turn for each direction; no buffer is filled before it is
    free."""
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 5), rng.randint(1, 10)
    held = tuple(sorted((rng.randint(1, 6) for _ in range(stages)), reverse=True))
    programs = [deque(cmd for step in steps(held, micro_batches, stage)[1] for cmd in step)
                for stage in range(stages)]
    buffers = [set() for _ in range(stages)]
    sent = {(stage, name): 0 for stage in range(stages) for name in ("activation", "gradient")}
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while program:
                cmd, name = program[0], type(program[0]).__name__
                source = {"RecvActivation": (stage - 1, "activation"),
                          "RecvGrad": (stage + 1, "gradient")}.get(name)
                if source and not sent[source]:
                    break
                if source:
                    sent[source] -= 1
                if name == "ForwardPass":
                    assert cmd.buffer_id not in buffers[stage]
                    buffers[stage].add(cmd.buffer_id)
                if name == "BackwardPass":
                    buffers[stage].remove(cmd.buffer_id)
                if name in ("SendActivation", "SendGrad"):
                    sent[stage, "activation" if name == "SendActivation" else "gradient"] += 1
                program.popleft()
                moved = True
    assert not any(programs) and not any(sent.values())


def test_what_is_let_go_has_arrived():
    """Activations when their gradient is back; gradients when the stage before could only go on with them."""
    _, _, box = steps((3, 1), 4, 1)
    assert [(unit, kind, index) for unit, kind, index in box.let_go if kind == "B"] == [
        (("F", m), "B", max(m - 3, -1)) for m in range(4)], "-1: none yet"
    _, _, box = steps((3, 1), 4, 0)
    assert [(unit, index) for unit, kind, index in box.let_go
            if kind == "F"] == [(("B", m), m) for m in range(4)]


@pytest.fixture
def engine(monkeypatch):
    """A PipelineEngine, patched, with as much in it as its setters need; its messages are known."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    box = Mailbox({(1, "recv"): None}, {1: (0, 1)})
    box.expect([], 1)
    monkeypatch.setattr(edges, "_mailbox", box)
    registry = Registry(edges.PATCHES)
    registry.enable(["deepspeed-edges"], required=True, disabled=frozenset())
    engine = PipelineEngine.__new__(PipelineEngine)
    config = SimpleNamespace(train_batch_size=8, train_micro_batch_size_per_gpu=2,
                             gradient_accumulation_steps=4)
    vars(engine).update(_config=config, dp_world_size=1, micro_batches=4)
    yield engine
    registry.undo()


def test_the_number_of_micro_batches_makes_nothing_forgotten(engine):
    """Messages are known for one micro-batch. Megatron-DeepSpeed sets the batch size before every step."""
    for batch_size, micro_batches in ((8, 4), (16, 8), (8, 4)):
        engine.set_train_batch_size(batch_size)
        assert engine.micro_batches == micro_batches and edges._mailbox.knows


def test_other_shapes_are_learned_anew(engine):
    engine.reset_activation_shape()
    assert not edges._mailbox.knows
