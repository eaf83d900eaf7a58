"""Tests that messages between megatron-core's pipeline stages have the shapes announced to their receiver."""

import pytest
import torch

from holmes_ext.errors import HolmesError
from holmes_ext.patches.megatron import stage_links
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.receive_order import Order1F1B

NEXT_RANK = 7  # of the next pipeline stage
SHAPE = (16, 2, 8)


class RecordingMailbox(Mailbox):
    """Mailbox of a rank on stage 0 that checks and records messages to stage 1, but sends nothing."""

    def __init__(self):
        super().__init__({}, {NEXT_RANK: (0, 1)})  # no process groups; stages of both ends
        self.sent = []  # (kind and number of the micro-batch, shape, rank of the receiver)

    def send(self, tensor, peer):
        self._check_announced(tensor, peer)
        self.sent.append((self.sending_pass, tuple(tensor.shape), peer))


def test_a_tensor_that_the_next_stage_has_no_buffer_for_is_not_sent(monkeypatch):
    """A tensor of another shape or type than megatron-core's get_tensor_shapes returned is an error."""
    # The messages of a training step, sent by stage 0 of a pipeline with two stages.
    step = stage_links._Step(
        RecordingMailbox(), Order1F1B(in_flight=(2, 1)), 0, torch.float32, "cpu"
    )
    monkeypatch.setattr(stage_links, "_step", step)  # _announce() reads it

    def get_tensor_shapes(seq_length):
        return [SHAPE]

    # _announce() wraps megatron-core's get_tensor_shapes, and notes the shapes that it returns. It is called
    # as a wrapper: the wrapped function, no instance, and the program's arguments.
    assert stage_links._announce(get_tensor_shapes, None, (), {"seq_length": 16}) == [SHAPE]
    for _ in range(2):  # micro-batches
        step.send("F", torch.ones(SHAPE), NEXT_RANK)  # "F": activation of a forward pass
    message = (
        r"stage 0 to stage 1 \(to rank 7\): micro-batch 2 is \(16, 1, 8\) torch.float32, expected "
        r"\(16, 2, 8\)"
    )
    with pytest.raises(HolmesError, match=message):
        step.send("F", torch.ones(16, 1, 8), NEXT_RANK)
    with pytest.raises(HolmesError, match="torch.bfloat16, expected"):
        step.send("F", torch.ones(SHAPE, dtype=torch.bfloat16), NEXT_RANK)
    # Only the first two were sent: (forward pass and its micro-batch, shape, receiver).
    assert step.mailbox.sent == [(("F", 0), SHAPE, NEXT_RANK), (("F", 1), SHAPE, NEXT_RANK)]
