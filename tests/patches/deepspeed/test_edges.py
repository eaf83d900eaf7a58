"""Tests the pipeline schedule that keeps more micro-batches in flight than DeepSpeed's 1F1B.

Checked are its order of commands, the buffers it takes, when sent tensors are released, and when the
sizes of messages that a stage has learned are dropped.

`held` gives the number of micro-batches that each stage holds at most, first stage first.
"""

import random
from collections import deque
from types import SimpleNamespace

import pytest

from holmes_ext.patches import Registry
from holmes_ext.patches.deepspeed import edges
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.receive_order import ReceiveOrder

schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")


class RecordingMailbox:
    """Mailbox that records which sent messages the schedule releases, and in which pass.

    A pass is ("F", micro-batch) for a forward and ("B", micro-batch) for a backward pass.
    """

    def __init__(self):
        self.unit = ("", 0)  # the current pass; the schedule sets it
        self.releases = []  # (pass, kind of the messages, index of the newest released message)

    def passed(self, kind, index):
        assert (kind, index) == self.unit

    def arrived(self, kind, index):
        self.releases.append((self.unit, kind, index))


def stock_schedule(stages, micro_batches, stage):
    return schedule.TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)


def run_schedule(held, micro_batches, stage):
    """Return holmes's schedule of a stage, its commands step by step, and its mailbox."""
    mailbox = RecordingMailbox()
    engine = SimpleNamespace(loss=None, grad_layer=None)
    stock = stock_schedule(len(held), micro_batches, stage)
    deeper = edges._schedule_class()(stock, ReceiveOrder(held), engine, mailbox)
    return deeper, list(deeper.steps()), mailbox


def computations(steps):
    """Return the forward and backward passes of the steps, each with the buffer that it uses."""
    passes = []
    for commands in steps:
        for command in commands:
            if isinstance(command, (schedule.ForwardPass, schedule.BackwardPass)):
                passes.append((type(command).__name__, command.buffer_id))
    return passes


@pytest.mark.parametrize("stages, micro_batches", [(2, 4), (3, 5), (4, 8), (4, 2)])
def test_1f1bs_own_number_is_the_engines_order(stages, micro_batches):
    """With as many micro-batches in flight as 1F1B has, the schedule is DeepSpeed's own."""
    in_flight_of_1f1b = tuple(range(stages, 0, -1))
    for stage in range(stages):
        stock = stock_schedule(stages, micro_batches, stage)
        ours, steps, _ = run_schedule(in_flight_of_1f1b, micro_batches, stage)
        assert ours.num_pipe_buffers() == stock.num_pipe_buffers()
        assert computations(steps) == computations(stock.steps())
        last_commands = [type(command).__name__ for command in steps[-1]]
        assert last_commands[-3:] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]


@pytest.mark.parametrize("seed", range(30))
def test_sends_meet_receives_and_buffers_suffice(seed):
    """Execute the commands of all stages: no stage waits for ever, and no buffer is overwritten.

    A stage executes its commands until it receives a message that is not sent yet; then the next
    stage continues. The test ends when no stage can continue.
    """
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 5), rng.randint(1, 10)
    held = tuple(sorted((rng.randint(1, 6) for _ in range(stages)), reverse=True))
    programs = []  # the commands that each stage has not executed yet
    for stage in range(stages):
        _, steps, _ = run_schedule(held, micro_batches, stage)
        programs.append(deque(command for commands in steps for command in commands))
    buffers = [set() for _ in range(stages)]  # those that hold activations, for each stage
    # Number of messages that a stage has sent and its neighbour has not received.
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
    """A stage releases a sent tensor only when its neighbour must have received it.

    Two stages hold 3 and 1 of 4 micro-batches. Stage 1 knows that stage 0 has the gradient of
    micro-batch m - 3 when the activation of micro-batch m comes: stage 0 could not have computed it
    before. Stage 0 knows that stage 1 has an activation when the gradient of it comes.
    """
    held, micro_batches = (3, 1), 4
    _, _, mailbox = run_schedule(held, micro_batches, stage=1)
    gradients = [(unit, index) for unit, kind, index in mailbox.releases if kind == "B"]
    none_yet = -1
    assert gradients == [(("F", m), max(m - 3, none_yet)) for m in range(micro_batches)]

    _, _, mailbox = run_schedule(held, micro_batches, stage=0)
    activations = [(unit, index) for unit, kind, index in mailbox.releases if kind == "F"]
    assert activations == [(("B", m), m) for m in range(micro_batches)]


@pytest.fixture
def engine(monkeypatch):
    """Return a patched PipelineEngine that has learned the sizes of its messages.

    It has only the attributes that its setters of the batch size and of the activation shape need.
    """
    from deepspeed.runtime.pipe.engine import PipelineEngine

    groups = {(1, "recv"): None}  # messages come from rank 1
    stages_by_peer = {1: (0, 1)}  # rank 1 is in stage 1, this rank in stage 0
    mailbox = Mailbox(groups, stages_by_peer)
    mailbox.expect([], 1)  # learned already: rank 1 sends no tensors
    monkeypatch.setattr(edges, "_mailbox", mailbox)
    registry = Registry(edges.PATCHES)
    registry.enable(["deepspeed-edges"], required=True, disabled=frozenset())
    engine = PipelineEngine.__new__(PipelineEngine)
    config = SimpleNamespace(train_batch_size=8, train_micro_batch_size_per_gpu=2,
                             gradient_accumulation_steps=4)
    vars(engine).update(_config=config, dp_world_size=1, micro_batches=4)
    yield engine
    registry.undo()


def test_the_number_of_micro_batches_makes_nothing_forgotten(engine):
    """A new batch size does not drop the learned messages.

    They are learned for a micro-batch, whose size does not change. Megatron-DeepSpeed sets the batch
    size before every step, so that they would otherwise be learned in every step.
    """
    for batch_size, micro_batches in ((8, 4), (16, 8), (8, 4)):
        engine.set_train_batch_size(batch_size)
        assert engine.micro_batches == micro_batches
        assert edges._mailbox.knows


def test_other_shapes_are_learned_anew(engine):
    """DeepSpeed's reset_activation_shape drops the learned messages."""
    engine.reset_activation_shape()
    assert not edges._mailbox.knows
