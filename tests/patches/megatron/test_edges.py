"""What megatron-core's schedule announces is what it sends."""

import pytest
import torch

from holmes_ext.errors import HolmesError
from holmes_ext.patches.megatron import edges
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.receive_order import ReceiveOrder


class Noting(Mailbox):
    def __init__(self):
        super().__init__({}, {7: (0, 1)})
        self.gone = []

    def send(self, tensor, peer):
        self._check(tensor, peer)
        self.gone.append((self.unit, tuple(tensor.shape), peer))


def test_a_tensor_that_the_next_stage_has_no_buffer_for_is_not_sent(monkeypatch):
    step = edges._Step(Noting(), ReceiveOrder((2, 1)), 0, torch.float32, "cpu")
    monkeypatch.setattr(edges, "_step", step)
    assert edges._announce(lambda **sizes: [(16, 2, 8)], None, (), {"seq_length": 16}) == [(16, 2, 8)]
    for _ in range(2):
        step.send("F", torch.ones(16, 2, 8), 7)
    told = (r"stage 0 to stage 1 \(to rank 7\): micro-batch 2 is \(16, 1, 8\) torch.float32, expected "
            r"\(16, 2, 8\)")
    with pytest.raises(HolmesError, match=told):
        step.send("F", torch.ones(16, 1, 8), 7)
    with pytest.raises(HolmesError, match="torch.bfloat16, expected"):
        step.send("F", torch.ones(16, 2, 8, dtype=torch.bfloat16), 7)
    assert step.mailbox.gone == [(("F", index), (16, 2, 8), 7) for index in range(2)]
