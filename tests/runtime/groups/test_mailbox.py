"""Messages between stages over real gloo groups: order, what is posted in advance, what is kept, bad shapes."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.watch import failure


def steps_of(rank, count, micro_batches=4, window=2):
    """Two stages: activations there, gradients (twice the activation) back; what each rank received in each step."""
    forward, backward = dist.new_group([0, 1]), dist.new_group([0, 1])
    sends, receives = (forward, backward) if rank == 0 else (backward, forward)
    groups = {(1 - rank, "send"): sends, (1 - rank, "recv"): receives}
    box, seen, posted = Mailbox(groups, {1 - rank: (rank, 1 - rank)}), [], []
    for step in range(count):
        box.begin(window, micro_batches, torch.empty(0))
        posted.append(len(box._posted[1 - rank]))
        got = []
        for index in range(micro_batches):
            tensor = torch.full((2, 3), float(10 * step + index))
            if rank == 0:
                box.unit = "F", index
                box.send(tensor, 1)
            else:
                box.recv(tensor, 0)
                got.append(tensor.clone())
                box.unit = "B", index
                box.send(2 * tensor, 0)
        for index in range(micro_batches) if rank == 0 else ():
            tensor = torch.empty(2, 3)
            box.recv(tensor, 1)
            box.arrived("F", index)
            assert len(box._sent["F"]) == micro_batches - 1 - index
            got.append(tensor.clone())
        box.end()
        assert not box._posted[1 - rank] and not any(box._sent.values())
        seen.append([float(tensor[0, 0]) for tensor in got])
    return seen, posted


def everything(rank):
    return steps_of(rank, 4)


def test_messages_come_in_order_and_are_posted_once_they_are_known():
    for rank, (seen, posted) in enumerate(run_ranks(everything, 2)):
        assert seen == [[(2 - rank) * (10 * step + index) for index in range(4)] for step in range(4)]
        assert posted == [0, 0, 2, 2]  # the first step, one to compare it with, then in advance


def other_shape(rank):
    group = dist.new_group([0, 1])
    box = Mailbox({(1 - rank, "send"): group, (1 - rank, "recv"): group}, {1 - rank: (rank, 1 - rank)})
    said = ""
    for step in range(3):
        box.begin(1, 1, torch.empty(0))
        if rank == 0:
            box.send(torch.ones(2), 1)
        else:
            try:
                box.recv(torch.empty(2 if step < 2 else 3), 0)
            except HolmesError as error:
                said = str(error)
        if not said:
            box.end()
    return said


def test_a_message_of_another_shape_is_one_line():
    said = "edge from stage 0 to stage 1: a message of rank 0 was (2,) torch.float32 in every step and is to be"
    assert f"{said} (3,) torch.float32 now" in run_ranks(other_shape, 2)[1]


def forgetting(rank):
    group = dist.new_group([0, 1])
    box = Mailbox({(1 - rank, "send"): group, (1 - rank, "recv"): group}, {1 - rank: (rank, 1 - rank)})
    for size in (2, 2, 2, 5):
        if size == 5:
            box.forget()
        box.begin(1, 1, torch.empty(0))
        tensor = torch.full((size,), float(size))
        box.send(tensor, 1) if rank == 0 else box.recv(tensor.zero_(), 0)
        box.end()
    return tensor.tolist()


def test_other_shapes_after_forgetting():
    assert run_ranks(forgetting, 2)[1] == [5.0] * 5


def mixed(rank):
    """Activation, mask and positions of each micro-batch, as DeepSpeed sends tuples."""
    group = dist.new_group([0, 1])
    box = Mailbox({(1 - rank, "send"): group, (1 - rank, "recv"): group}, {1 - rank: (rank, 1 - rank)})
    got = []
    for step in range(4):
        box.begin(2, 3, torch.empty(0))
        for index in range(3):
            number = 10 * step + index
            tensors = [torch.full((2, 2), number / 8), torch.tensor([number % 2 == 0]), torch.tensor([2**40 + number])]
            box.unit = "F", index
            for tensor in tensors:
                if rank:
                    box.recv(tensor.zero_(), 0)
                else:
                    box.send(tensor, 1)
            got.append((float(tensors[0][1, 1]), bool(tensors[1]), int(tensors[2])))
        box.end()
    return got


def test_tensors_of_several_kinds_whole_numbers_among_them():
    wanted = [(n / 8, n % 2 == 0, 2**40 + n) for step in range(4) for n in range(10 * step, 10 * step + 3)]
    assert run_ranks(mixed, 2)[1] == wanted


def test_what_was_not_announced_is_not_sent():
    """Each tensor of a micro-batch in its place; nothing is known before the announcement, and after another one."""
    box = Mailbox({}, {5: (1, 2)})
    box.unit = "F", 0
    box.check(torch.ones(7), 5)
    forms = [((2, 3), torch.float32), ((4,), torch.int64)]
    box.announce(forms, 5)
    for index in range(2):
        box.unit = "F", index
        for shape, dtype in forms:
            box.check(torch.ones(shape, dtype=dtype), 5)
    box.unit = "F", 2
    box.check(torch.ones(2, 3), 5)
    told = r"from stage 1 to stage 2 \(to rank 5\): micro-batch 2 is \(5,\) torch.int64, announced was \(4,\)"
    with pytest.raises(HolmesError, match=told):
        box.check(torch.ones(5, dtype=torch.int64), 5)
    box.announce([((9,), torch.float32)], 5)
    with pytest.raises(HolmesError, match="announced was .9,. torch.float32"):
        box.check(torch.ones(9, dtype=torch.bfloat16), 5)



class Lost:
    """A receive whose sender has ended."""

    def wait(self):
        raise dist.DistBackendError("Connection closed by peer [10.0.0.1]:5")


def test_who_waits_for_a_lost_rank_says_at_which_edge(monkeypatch):
    box = Mailbox({(5, "recv"): None}, {5: (2, 1)})
    monkeypatch.setattr(dist, "irecv", lambda tensor, peer, group: Lost())
    monkeypatch.setattr(failure, "broken", lambda what, error: f"holmes: {what} failed: {error}")
    told = r"^pipeline edge from stage 1 \(rank 5\) to stage 2 failed: Connection closed by peer"
    with pytest.raises(HolmesError, match=told):
        box.recv(torch.empty(2), 5)
