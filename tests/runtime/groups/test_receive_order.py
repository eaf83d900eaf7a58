"""Pipelines whose messages are kernels that wait for their other end.

No order of hardware queues, and no wait for the device, holds the messages up for ever.
"""

import itertools
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hardware_queues import SYNCHRONIZE, Join, Kernel, stuck
from launches import Launch, Wait, faults

from holmes_ext.plan.schedule import PassOrder, Times, before
from holmes_ext.planner.schedule.solve import Rule, order_by_rules
from holmes_ext.runtime.groups.mailbox import Mailbox
from holmes_ext.runtime.groups.receive_order import ListedOrder, Order1F1B

SEEDS = range(200)


#: Of each micro-batch: an activation and a mask.
FORMS = ((2, 3), (4,))


def drawn(seed):
    """Draw a pipeline's order.

    Returns:
        (micro-batches in flight, on no stage more than on the one before, or passes with an order
        of each stage link's messages; micro-batches of a step)
    """
    rng = random.Random(seed)
    stages, micro_batches = rng.randint(2, 6), rng.randint(1, 12)
    held = sorted((rng.randint(1, 9) for _ in range(stages)), reverse=True)
    if seed % 2:
        passes, times = drawn_passes(rng, stages, micro_batches, held)
        return ListedOrder(passes.in_one_order(times)), micro_batches
    busy = [rng.choice((1.0, 1.0, rng.uniform(0.2, 3.0))) for _ in range(stages)]
    return Order1F1B(tuple(held), tuple(busy) if rng.random() < 0.7 else ()), micro_batches


def drawn_passes(rng, stages, micro_batches, held):
    """Any that a list scheduler makes, and the times by which it made them."""

    def some():
        return tuple(rng.choice((0.1, 1.0, rng.uniform(0.2, 3.0))) for _ in range(stages))

    times = Times(some(), some(), some(), some()[1:], micro_batches, tuple(held))
    rules = [
        Rule(rng.randint(1, 9), rng.randint(0, 5), rng.choice((0.0, 1.0))) for _ in range(stages)
    ]
    return PassOrder(tuple(map(tuple, order_by_rules(times, rules)[0]))), times


def launched(monkeypatch, flight, micro_batches, steps=2):
    """{stage: what it launches, in order}: messages, waits for them, and ("pass", kind, micro-batch)."""
    logs, stages = {}, stages_of(flight)
    for stage in range(stages):
        log = logs[stage] = []

        def message(operation, peer, group, log=log, stage=stage, positions=itertools.count(1)):
            number = next(positions)
            log.append(
                Launch(
                    number, group, tuple(sorted((stage, peer))), operation, 24, peer, stays=False
                )
            )

            def wait():
                next(positions)
                log.append(Wait(number))

            return SimpleNamespace(wait=wait)

        monkeypatch.setattr(
            dist, "isend", lambda tensor, peer, group, to=message: to("send", peer, group)
        )
        monkeypatch.setattr(
            dist, "irecv", lambda tensor, peer, group, to=message: to("receive", peer, group)
        )
        peers = [peer for peer in (stage - 1, stage + 1) if 0 <= peer < stages]
        groups = {
            (peer, way): f"{min(peer, stage)} "
            f"{('activations', 'gradients')[(way == 'send') == (peer < stage)]}"
            for peer in peers
            for way in ("send", "recv")
        }
        box = Mailbox(groups, {peer: (stage, peer) for peer in peers})
        for peer in peers:
            box.expect([(form, torch.float32) for form in FORMS], peer)
        for _ in range(steps):
            one_step(box, flight, stage, micro_batches, log)
    return logs


def one_step(box, flight, stage, micro_batches, log):
    """As patches/deepspeed/stage_links.py goes through it."""
    last, order = stages_of(flight) - 1, flight.order(stage, micro_batches)
    returned = before(flight.order(stage - 1, micro_batches), "BI", "F") if stage else ()
    box.begin(flight, micro_batches, torch.empty(0))
    for letter, index in order:
        if letter == "W":
            continue
        box.sending_pass = kind, _ = "F" if letter == "F" else "B", index
        source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        for form in FORMS if 0 <= source <= last else ():
            box.recv(torch.empty(form), source)
        log.append(("pass", kind, index))
        for form in FORMS if 0 <= target <= last else ():
            box.send(torch.empty(form), target)
        box.post_due_receives(kind, index)
        if kind == "B":
            box.release_sent("F", index)
        elif stage:
            box.release_sent("B", returned[index] - 1)
    box.end()


def stages_of(flight):
    return len(flight.schedule.stages if isinstance(flight, ListedOrder) else flight.in_flight)


def messages(log):
    return [entry for entry in log if not isinstance(entry, tuple)]


@pytest.mark.full(share=4)
@pytest.mark.parametrize("bound", [False, True])
def test_each_launch_may_wait_for_the_one_before_it(bound, monkeypatch):
    for seed in SEEDS:
        logs = {rank: messages(log) for rank, log in launched(monkeypatch, *drawn(seed)).items()}
        assert faults(logs, bound, blocking=True) == [], seed


def program(log, rank, stream_of=None, synchronize=()):
    """Return what torch puts into a device's streams.

    A message's stream waits for all that was computed so far. stream_of: which streams are one;
    synchronize: of each entry of the log, whether the host waits for the device after it.
    """
    counts, made, stream_of, entries = Counter(), [], stream_of or {}, messages(log)

    def stream(name):
        return stream_of.get(name, name)

    for entry, waits in itertools.zip_longest(log, synchronize):
        if isinstance(entry, tuple):
            made += [Kernel(stream("compute")), *([SYNCHRONIZE] if waits else [])]
        elif isinstance(entry, Wait):
            made.append(Join(stream("compute"), stream(entries[entry.number - 1].group)))
        else:
            ends = (rank, entry.peer) if entry.operation == "send" else (entry.peer, rank)
            counts[ends] += 1
            over = stream(entry.group)
            made += [
                Join(over, stream("compute")),
                Kernel(over, ((*ends, counts[ends]), entry.operation)),
            ]
    return made


@pytest.mark.parametrize("queues", [1, 2, 3])
def test_any_hardware_queues_and_waits_for_the_device(queues, monkeypatch):
    """And any streams that are one: with one queue all of them."""
    for seed in SEEDS:
        rng, programs, queue_of = random.Random(seed), {}, {}
        part = rng.choice((0.2, 1.0))  # of the passes, after which the host waits for the device
        for rank, log in launched(monkeypatch, *drawn(seed)).items():
            stream_of = {one.stream: queues > 1 and rng.randrange(5) for one in program(log, rank)}
            programs[rank] = program(log, rank, stream_of, [rng.random() < part for _ in log])
            queue_of |= {(rank, stream): rng.randrange(queues) for stream in stream_of.values()}
        assert stuck(programs, lambda *stream, queue_of=queue_of: queue_of[stream]) == [], seed


def test_a_posted_receive_before_a_wait_is_found():
    waits = [Kernel("a", ("x", "receive")), SYNCHRONIZE, Kernel("b", ("y", "send"))]
    other = [Kernel("b", ("y", "receive")), SYNCHRONIZE, Kernel("a", ("x", "send"))]
    assert stuck({0: waits, 1: other}, lambda rank, stream: hash((rank, stream))) == [0, 1]
    del waits[1]
    assert stuck({0: waits, 1: other}, lambda rank, stream: 0) == []
    assert stuck(
        {0: [replace(one, stream="a") for one in waits], 1: other}, lambda rank, stream: 0
    ) == [0, 1]


def test_with_gloo_no_message_waits_for_its_receiver(monkeypatch):
    """With gloo, no message waits for its receiver.

    The word that a receive is posted goes with, or before, the message without which the other end
    does not send. No more receives are posted than the other end may have sent by then.
    """
    for seed in SEEDS:
        rng = random.Random(seed)
        stages, count = rng.randint(2, 6), rng.randint(1, 12)
        held = sorted(rng.choices(range(1, 10), k=stages))[::-1]
        listed_order = ListedOrder(drawn_passes(rng, stages, count, held)[0])
        flight = listed_order if seed % 2 else Order1F1B(tuple(held), needs_message_order=False)
        logs = launched(monkeypatch, flight, count, steps=1)
        for stage, peer in [
            pair for first in range(stages - 1) for pair in ((first, first + 1), (first + 1, first))
        ]:
            letter = "F" if stage < peer else "B"
            for number in range(count):
                left = seen(
                    logs[stage], letter, number
                )  # what the sender needed of the other one before
                needed = received(left, stage, peer)
                posted, early = (
                    posts(logs[peer], stage),
                    sent_before(logs[peer], peer, stage, number),
                )
                assert early <= needed, (seed, stage, peer, number)
                assert len(posted) == count * len(FORMS)


def test_the_mailbox_posts_receives_where_the_list_says(monkeypatch):
    """The mailbox posts each receive where posted_after says.

    torch's pipelining and the simulation go by posted_after: of each receive, how much was sent to
    that end before.
    """
    for seed in SEEDS[1:60:2]:
        flight, count = drawn(seed)
        for passes in (flight.schedule, replace(flight.schedule, activations_before=())):
            for stage, log in launched(monkeypatch, ListedOrder(passes), count, steps=1).items():
                for peer in {one.peer for one in messages(log) if isinstance(one, Launch)}:
                    kind = "F" if peer < stage else "B"
                    for number in range(count):
                        after = passes.posted_after(min(stage, peer), kind, number)
                        sent = (after[1] + 1) * len(FORMS) if after else 0
                        assert sent_before(log, stage, peer, number) == sent, (
                            seed,
                            stage,
                            peer,
                            number,
                        )


def seen(log, letter, number):
    return log[: log.index(("pass", letter, number))]


def received(log, stage, peer):
    """Messages of `peer` that had to be there."""
    numbers = {entry.number for entry in log if isinstance(entry, Wait)}
    return sum(
        one.operation == "receive" and one.peer == peer and one.number in numbers
        for one in log
        if isinstance(one, Launch)
    )


def posts(log, peer):
    return [
        place
        for place, one in enumerate(log)
        if isinstance(one, Launch) and one.operation == "receive" and one.peer == peer
    ]


def sent_before(log, own, peer, number):
    """Count the messages that `own` had sent to `peer` before it posted a receive.

    The receive is the one of the last form of micro-batch `number`.
    """
    place = posts(log, peer)[(number + 1) * len(FORMS) - 1]
    return sum(
        isinstance(one, Launch) and one.operation == "send" and one.peer == peer
        for one in log[:place]
    )
