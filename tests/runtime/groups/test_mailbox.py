"""Messages between stages over real gloo groups.

The tests check their order, receives posted in advance, kept tensors and bad shapes.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from holmes_ext.errors import HolmesError
from holmes_ext.plan.schedule import passes
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.receive_order import Order1F1B
from holmes_ext.runtime.watch import failure

FLIGHT, MICRO_BATCHES = Order1F1B((3, 1)), 4


def mailbox_of(rank):
    """Of two stages, a group for each direction."""
    forward, backward = dist.new_group([0, 1]), dist.new_group([0, 1])
    sends, receives = (forward, backward) if rank == 0 else (backward, forward)
    return Mailbox(
        {(1 - rank, "send"): sends, (1 - rank, "recv"): receives}, {1 - rank: (rank, 1 - rank)}
    )


def steps_of(rank, count):
    """Send activations there, and gradients (twice the activation) back.

    Returns:
        the values that each rank received in each step, and for how many micro-batches it had
        posted receives after each pass of one
    """
    box, seen = mailbox_of(rank), []
    box.expect([((2, 3), torch.float32)], 1 - rank)
    for step in range(count):
        box.begin(FLIGHT, MICRO_BATCHES, torch.empty(0))
        got, posted = [], []
        for kind, index, _ in passes(rank, 2, MICRO_BATCHES, in_flight=FLIGHT.in_flight[rank]):
            box.sending_pass = kind, index
            tensor = torch.full((2, 3), float(10 * step + index))
            if (kind, rank) in (("F", 1), ("B", 0)):
                box.recv(tensor.zero_(), 1 - rank)
                got.append(float(tensor[0, 0]))
            else:
                box.send(tensor if rank == 0 else 2 * tensor, 1 - rank)
            box.post_due_receives(kind, index)
            posted.append(box._posted_micro_batches[1 - rank])
            if (kind, rank) == ("B", 0):
                box.release_sent("F", index)
                assert len(box._sent_messages["F"]) == min(
                    FLIGHT.in_flight[0] - 1, MICRO_BATCHES - 1 - index
                )
        box.end()
        assert not box._posted[1 - rank] and not any(box._sent_messages.values())
        seen.append(got)
    return seen, posted


def everything(rank):
    return steps_of(rank, 3)


def test_messages_come_in_order_and_are_posted_as_early_as_both_ends_can():
    """Messages come in order, and receives are posted as early as both ends can.

    With 3 and 1 in flight two activations travel before the first gradient, on both stages one pass
    early.
    """
    (first, *of_first), (second, *of_second) = run_ranks(everything, 2)
    for factor, seen in ((2, first), (1, second)):
        assert seen == [[factor * (10 * step + index) for index in range(4)] for step in range(3)]
    assert of_first == [[0, 1, 2, 2, 3, 3, 4, 4]]  # after F 0, F 1, F 2, B 0, F 3, B 1, B 2, B 3
    assert of_second == [[2, 2, 3, 3, 4, 4, 4, 4]]  # after F 0, B 0, F 1, ...


def taught(rank, sizes, told=True):
    """Return what the mailbox learns in each step that it sees.

    A step has one micro-batch, whose message has another size in each.
    """
    box, known = mailbox_of(rank), []
    for before, size in zip((sizes[0], *sizes), sizes):
        if told and size != before:
            box.clear_message_specs()
        tensor = torch.full((size,), float(size))
        known.append(box.has_message_specs)
        learning = not box.has_message_specs
        box.start_recording() if learning else box.begin(FLIGHT, 1, torch.empty(0))
        try:
            box.recv(tensor.zero_(), 0) if rank else box.send(tensor, 1)
        except HolmesError as error:
            return str(error), known
        box.finish_recording(1) if learning else box.end()
    return tensor.tolist(), known


def other_shape(rank):
    return taught(rank, (2, 2, 3) if rank else (2, 2, 2), told=False)


def test_a_message_of_another_shape_is_one_line():
    said = (
        "stage link from stage 0 to stage 1: a message of rank 0 was (2,) torch.float32 in every "
        "step so far, "
        "but is"
    )
    assert f"{said} (3,) torch.float32 now" in run_ranks(other_shape, 2)[1][0]


def forgetting(rank):
    return taught(rank, (2, 2, 5, 5))


def test_other_shapes_after_forgetting():
    assert run_ranks(forgetting, 2) == [([5.0] * 5, [False, True, False, True])] * 2


def test_messages_that_differ_from_micro_batch_to_micro_batch(monkeypatch):
    box = Mailbox({(5, "recv"): None}, {5: (2, 1), 9: (2, 3)})
    monkeypatch.setattr(dist, "recv", lambda tensor, peer, group: None)
    for mixed in (False, True):
        box.start_recording()
        box.recv(torch.ones(1, dtype=torch.int64), 5)
        box.discard_recorded(5)  # that was about what comes
        for index in range(2):
            box.recv(torch.ones(2), 5)
            box.recv(torch.ones(3 + mixed * index), 5)
        if mixed:
            with pytest.raises(
                HolmesError,
                match="stage 1 to stage 2: rank 5 does not send the same of each micro-b",
            ):
                box.finish_recording(2)
        else:
            box.finish_recording(2)
            assert box.has_message_specs and box._expected == {
                5: [((2,), torch.float32), ((3,), torch.float32)],
                9: [],
            }


def mixed(rank):
    """Activation, mask and positions of each micro-batch, as DeepSpeed sends tuples."""
    box, got = mailbox_of(rank), []
    forms = [((2, 2), torch.float32), ((1,), torch.bool), ((1,), torch.int64)]
    box.expect([] if rank == 0 else forms, 1 - rank)
    for step in range(4):
        box.begin(FLIGHT, 3, torch.empty(0))
        for index in range(3):
            number = 10 * step + index
            tensors = [
                torch.full((2, 2), number / 8),
                torch.tensor([number % 2 == 0]),
                torch.tensor([2**40 + number]),
            ]
            box.sending_pass = "F", index
            for tensor in tensors:
                if rank:
                    box.recv(tensor.zero_(), 0)
                else:
                    box.send(tensor, 1)
            box.post_due_receives("F", index)
            got.append((float(tensors[0][1, 1]), bool(tensors[1]), int(tensors[2])))
        box.end()
    return got


def test_tensors_of_several_kinds_whole_numbers_among_them():
    wanted = [
        (n / 8, n % 2 == 0, 2**40 + n) for step in range(4) for n in range(10 * step, 10 * step + 3)
    ]
    assert run_ranks(mixed, 2)[1] == wanted


def test_what_was_not_announced_is_not_sent():
    """Each tensor of a micro-batch is sent in its place.

    Nothing is known before the announcement, and after another one.
    """
    box = Mailbox({}, {5: (1, 2)})
    box._check_announced(torch.ones(7), 5)
    forms = [((2, 3), torch.float32), ((4,), torch.int64)]
    box.announce(forms, 5)
    for _ in range(2):
        for shape, dtype in forms:
            box._check_announced(torch.ones(shape, dtype=dtype), 5)
    box._check_announced(torch.ones(2, 3), 5)
    told = r"from stage 1 to stage 2 \(to rank 5\): micro-batch 2 is \(5,\) torch.int64, expected \(4,\)"
    with pytest.raises(HolmesError, match=told):
        box._check_announced(torch.ones(5, dtype=torch.int64), 5)
    box.announce([((9,), torch.float32)], 5)
    with pytest.raises(HolmesError, match="expected .9,. torch.float32"):
        box._check_announced(torch.ones(9, dtype=torch.bfloat16), 5)


class Lost:
    """A receive whose sender has ended."""

    def wait(self):
        raise dist.DistBackendError("Connection closed by peer [10.0.0.1]:5")


def test_who_waits_for_a_lost_rank_says_at_which_stage_link(monkeypatch):
    box = Mailbox({(5, "recv"): None}, {5: (2, 1)})
    box.expect([((2,), torch.float32)], 5)
    box.begin(Order1F1B((3, 2, 1)), 1, torch.empty(0))
    monkeypatch.setattr(dist, "irecv", lambda tensor, peer, group: Lost())
    monkeypatch.setattr(failure, "broken", lambda what, error: f"holmes: {what} failed: {error}")
    told = r"^stage link from stage 1 \(rank 5\) to stage 2 failed: Connection closed by peer"
    with pytest.raises(HolmesError, match=told):
        box.recv(torch.empty(2), 5)
