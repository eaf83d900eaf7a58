"""Tests the pipeline schedule that replaces DeepSpeed's 1F1B schedule (planned_schedule.py).

It has more micro-batches in flight than 1F1B: micro-batches whose forward pass has begun, and whose backward
pass has not ended. The tests check

- the order of the engine's instructions, and that the engine has enough buffers
- that a sent tensor is kept until the neighbouring stage has received it
- when the recorded sizes of messages are deleted
"""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from holmes_ext.patches import Registry
from holmes_ext.patches.deepspeed import stage_links
from holmes_ext.patches.deepspeed.planned_schedule import planned_schedule_class
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.receive_order import Order1F1B

schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")


class RecordingMailbox:
    """Mock of the mailbox, which transfers the messages between pipeline stages in the background.

    It records in which pass the schedule releases which sent messages. A pass is ("F", micro-batch) for a
    forward pass and ("B", micro-batch) for a backward pass.
    """

    def __init__(self):
        self.sending_pass = ("", 0)  # the current pass; the schedule sets it
        self.releases = []  # tuples (current pass, "F" or "B", micro-batch of the newest released message)

    def post_due_receives(self, kind, index):  # the schedule calls it after each pass
        assert (kind, index) == self.sending_pass

    def release_sent(self, kind, index):  # the schedule calls it to release messages up to `index`
        self.releases.append((self.sending_pass, kind, index))


def stock_schedule(stages, micro_batches, stage):
    return schedule.TrainSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage)


class PlannedRun(NamedTuple):
    schedule: Any  # a PlannedSchedule
    steps: list[list[Any]]  # lists of instructions, which the engine executes in a training step
    mailbox: RecordingMailbox

    @property
    def instructions(self):
        return flattened(self.steps)


def flattened(steps):
    return [instruction for instructions in steps for instruction in instructions]


def run_schedule(in_flight, micro_batches, stage):
    """Return the planned schedule of one pipeline stage, and what it does in one training step.

    Args:
        in_flight: For each stage, the largest number of micro-batches between forward and backward pass.
        micro_batches: Number of micro-batches in the step.
        stage: The stage whose schedule is returned.
    """
    mailbox = RecordingMailbox()
    engine = SimpleNamespace(loss=None, grad_layer=None)
    deepspeeds_schedule = stock_schedule(len(in_flight), micro_batches, stage)
    planned_schedule_type = planned_schedule_class()
    planned = planned_schedule_type(deepspeeds_schedule, Order1F1B(in_flight), engine, mailbox)
    steps = list(planned.steps())  # makes the schedule call the mailbox, too
    return PlannedRun(planned, steps, mailbox)


def computations(instructions):
    """Return the forward and backward passes among instructions, each with the number of its buffer."""
    passes = (schedule.ForwardPass, schedule.BackwardPass)
    return [
        (type(each).__name__, each.buffer_id) for each in instructions if isinstance(each, passes)
    ]


@pytest.mark.parametrize("stages, micro_batches", [(2, 4), (3, 5), (4, 8), (4, 2)])
def test_in_flight_numbers_of_1f1b_give_deepspeeds_order(stages, micro_batches):
    """If stages begin as many micro-batches as in 1F1B, the planned schedule is DeepSpeed's schedule."""
    in_flight_of_1f1b = tuple(range(stages, 0, -1))  # the first stage has `stages`, the last one 1
    for stage in range(stages):
        stock = stock_schedule(stages, micro_batches, stage)
        planned = run_schedule(in_flight_of_1f1b, micro_batches, stage)
        assert planned.schedule.num_pipe_buffers() == stock.num_pipe_buffers()
        assert computations(planned.instructions) == computations(flattened(stock.steps()))
        last_instructions = [type(instruction).__name__ for instruction in planned.steps[-1]]
        assert last_instructions[-3:] == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]


class SimulatedStage:
    """A pipeline stage that executes the instructions of a schedule without a model.

    Args:
        stage: Number of the stage.
        instructions: Instructions of DeepSpeed's pipeline engine, such as RecvGrad.
        sent: Number of messages that were sent and not yet received, by (stage of the sender, "activation" or
            "gradient"). All stages share this dictionary.
    """

    def __init__(self, stage, instructions, sent):
        self.stage = stage
        self.instructions = deque(instructions)  # those that are not executed yet
        self.sent = sent
        self.used_buffers = set()  # buffers with activations that a backward pass still needs

    def run(self):
        """Execute instructions until one has to wait for a message.

        Return whether any instruction was executed.
        """
        has_moved = False
        while self.instructions and not self._must_wait(self.instructions[0]):
            self._execute(self.instructions.popleft())
            has_moved = True
        return has_moved

    def _awaited(self, instruction):
        """Return (stage of the sender, kind) of the message that an instruction receives, or None."""
        name = type(instruction).__name__
        if name == "RecvActivation":
            return self.stage - 1, "activation"
        if name == "RecvGrad":
            return self.stage + 1, "gradient"
        return None

    def _must_wait(self, instruction):
        awaited = self._awaited(instruction)
        return awaited is not None and self.sent[awaited] == 0

    def _execute(self, instruction):
        # self.sent counts the messages on their way: (stage of the sender, kind) -> number.
        awaited = self._awaited(instruction)  # the message that the instruction receives, or None
        if awaited is not None:
            self.sent[awaited] -= 1
        name = type(instruction).__name__
        # A forward pass fills a buffer, which is in use until the backward pass of the micro-batch.
        if name == "ForwardPass":
            assert instruction.buffer_id not in self.used_buffers  # it would be overwritten
            self.used_buffers.add(instruction.buffer_id)
        elif name == "BackwardPass":
            self.used_buffers.remove(instruction.buffer_id)
        elif name == "SendActivation":
            self.sent[self.stage, "activation"] += 1
        elif name == "SendGrad":
            self.sent[self.stage, "gradient"] += 1


@pytest.mark.parametrize("seed", range(30))
def test_sends_meet_receives_and_buffers_suffice(seed):
    """All stages of a random pipeline can execute all their instructions, and receive all messages.

    `in_flight` has, for each stage, the largest number of micro-batches between their forward and their
    backward pass. Each of them needs its own buffer.
    """
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 5), rng.randint(1, 10)
    # No stage has more micro-batches in flight than the stage before it.
    in_flight = tuple(sorted((rng.randint(1, 6) for _ in range(stages)), reverse=True))
    # Messages on their way: (stage of the sender, kind) -> number. All simulated stages share this dict.
    sent = {(stage, kind): 0 for stage in range(stages) for kind in ("activation", "gradient")}
    pipeline = []
    for stage in range(stages):
        planned = run_schedule(in_flight, micro_batches, stage)
        pipeline.append(SimulatedStage(stage, planned.instructions, sent))

    # run() executes instructions until one has to wait for a message. It returns False if it executed none.
    while any(stage.run() for stage in pipeline):
        pass  # a stage has sent messages; maybe another one can now go on
    assert not any(stage.instructions for stage in pipeline)  # all are executed
    assert not any(sent.values())  # all messages are received


def test_released_tensors_have_arrived():
    """A stage releases a sent tensor only when the neighbouring stage must have received it.

    Up to 3 micro-batches on stage 0, and 1 on stage 1, are between their forward and their backward pass.
    """
    in_flight, micro_batches = (3, 1), 4
    no_micro_batch = -1

    # In the lists below: (pass of this stage, newest micro-batch whose message is released in that pass).
    # A pass is ("F", m) or ("B", m): the forward or backward pass of micro-batch m.

    # Stage 1 sends gradients. Stage 0 computes the activation of micro-batch 3 only after it has received the
    # gradient of micro-batch 0, because it holds at most 3. Stage 1 may release this gradient when the
    # activation arrives.
    releases = run_schedule(in_flight, micro_batches, stage=1).mailbox.releases
    gradients = [(current_pass, newest) for current_pass, kind, newest in releases if kind == "B"]
    assert gradients == [
        (("F", 0), no_micro_batch),
        (("F", 1), no_micro_batch),
        (("F", 2), no_micro_batch),
        (("F", 3), 0),
    ]

    # Stage 0 sends activations. When the gradient of a micro-batch arrives, stage 1 has received its
    # activation.
    releases = run_schedule(in_flight, micro_batches, stage=0).mailbox.releases
    activations = [(current_pass, newest) for current_pass, kind, newest in releases if kind == "F"]
    assert activations == [(("B", 0), 0), (("B", 1), 1), (("B", 2), 2), (("B", 3), 3)]


@pytest.fixture
def engine(monkeypatch):
    """Yield a DeepSpeed PipelineEngine with the patches of stage_links.py, after its first training step.

    In that step, the mailbox, which transfers messages in the background, has recorded their sizes. The
    engine has only the attributes that set_train_batch_size and reset_activation_shape need.
    """
    from deepspeed.runtime.pipe.engine import PipelineEngine

    groups = {(1, "recv"): None}  # a (mock) process group to receive from rank 1
    stages_by_peer = {1: (0, 1)}  # this rank is in stage 0, rank 1 in stage 1
    mailbox = Mailbox(groups, stages_by_peer)
    mailbox.expect([], 1)  # the record: rank 1 sends no tensors
    monkeypatch.setattr(stage_links, "_mailbox", mailbox)  # the patches use this one
    registry = Registry(stage_links.PATCHES)
    registry.enable(["deepspeed-stage-links"], required=True, disabled=frozenset())
    engine = PipelineEngine.__new__(
        PipelineEngine
    )  # without __init__, which needs a model and ranks
    # A batch of 8 samples is 4 micro-batches of 2.
    config = SimpleNamespace(
        train_batch_size=8, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4
    )
    vars(engine).update(_config=config, dp_world_size=1, micro_batches=4)
    yield engine
    registry.undo()


def test_set_train_batch_size_keeps_the_record(engine):
    """DeepSpeed's set_train_batch_size does not delete the recorded sizes of messages between stages.

    The record is of one micro-batch. A new batch size changes only the number of micro-batches.
    """
    for batch_size, micro_batches in ((8, 4), (16, 8), (8, 4)):  # a micro-batch has 2 samples
        engine.set_train_batch_size(batch_size)
        assert engine.micro_batches == micro_batches
        assert stage_links._mailbox.has_message_specs  # the record exists


def test_reset_activation_shape_deletes_the_record(engine):
    """DeepSpeed's reset_activation_shape deletes the recorded sizes of messages between stages."""
    engine.reset_activation_shape()
    assert not stage_links._mailbox.has_message_specs  # the record is empty
