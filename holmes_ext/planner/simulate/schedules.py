"""Order of passes, sends and receives on a stage, as each framework starts and awaits them.

The operations are

    (letter, micro_batch, chunk)      a pass: "F" forward, "B" backward, "I" and "W" its gradients of input
                                      and weights
    ("post", message)                 start a send or a receive
    ("post", message, sent, ...)      start a receive while the messages `sent` go to the same stage; the
                                      receiver's notice that it is ready follows them
    ("wait", message)                 wait for its end

A message is ("a", virtual_stage, micro_batch), the activation from a virtual stage to the next,
or ("g", virtual_stage, micro_batch), its gradient back. A virtual stage is a chunk of layers,
numbered in the order of the forward pass: chunk c of stage s is virtual stage c x stages + s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from holmes_ext.plan.engine import AWAITED, PAIRED
from holmes_ext.plan.schedule import Pass, PassOrder, passes
from holmes_ext.planner.simulate.events import Op

#: (ACTIVATION or GRADIENT, virtual stage before the link, micro-batch)
Message = tuple[str, int, int]
ACTIVATION, GRADIENT = "a", "g"
#: Message -> pass that needs it.
_PASS_OF = {ACTIVATION: "F", GRADIENT: "B"}


def schedule(
    sends: str,
    stage: int,
    stages: int,
    micro_batches: int,
    virtual: int = 1,
    in_flight: int = 0,
    breadth_first: bool = False,
    planned: PassOrder | None = None,
) -> Iterator[Op]:
    """Return the operations of a stage in a step.

    Receives are posted (started) at the step's start if stages have several chunks, or if a warm-up
    depth is given. A written order of passes may say after which send each receive is posted.
    Otherwise receives are posted as the framework does in its 1F1B schedule.

    Args:
        sends: How the framework sends: AWAITED (DeepSpeed: each send is waited for), PAIRED
            (megatron-core: a send and the next receive are waited for together), or POSTED (sends
            are not waited for).
        stage: The stage.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        virtual: Chunks of a stage.
        in_flight: Warm-up depth (micro-batches begun before the first backward pass); 0 for the
            framework's own 1F1B.
        breadth_first: Pass all micro-batches through a chunk before the next chunk.
        planned: Written order of passes.
    """
    neighbours = _Neighbours(stage, stages, last_virtual_stage=stages * virtual - 1)
    if planned:
        chunk = 0  # the only chunk
        listed = [(letter, micro_batch, chunk) for letter, micro_batch in planned.stages[stage]]
        # Not empty if the order says after which send each receive is posted.
        says_when_posted = bool(planned.activations_before)
        return _with_early_receives(listed, neighbours, planned if says_when_posted else None)
    order = passes(stage, stages, micro_batches, virtual, in_flight, breadth_first)
    if virtual > 1 or in_flight or breadth_first or sends not in (AWAITED, PAIRED):
        return _with_early_receives(order, neighbours)
    if sends == PAIRED:
        return _megatron_1f1b(order, neighbours, warm_up=min(stages - stage - 1, micro_batches))
    return _deepspeed_1f1b(neighbours, micro_batches)


class _Neighbours:
    """Messages that the passes of a stage receive and send: activations and gradients.

    A virtual stage is a chunk of layers, numbered over all stages in the order of the forward pass.
    Both messages between virtual stages v and v + 1 have the number v: the activation from v to v +
    1, and the gradient back from v + 1 to v.
    """

    def __init__(self, stage: int, stages: int, last_virtual_stage: int):
        self.stage = stage
        self.stages = stages
        self.last_virtual_stage = last_virtual_stage

    def needs(self, stage_pass: Pass) -> list[Message]:
        """Return a list with the message that a pass must have received; [] if it needs none.

        A virtual stage is a chunk of layers; the virtual stages are numbered in the order of the
        forward pass. A message is (letter, link, micro-batch), where link n connects the virtual
        stages n and n + 1. Example: the passes of micro-batch 5 on virtual stage 3 need

            forward pass "F"             [("a", 2, 5)]    activation from 2; [] on virtual stage 0
            backward pass "B" or "I"     [("g", 3, 5)]    gradient from 4; [] on the last
            gradients of weights "W"     []
        """
        letter, micro_batch, chunk = stage_pass
        virtual_stage = chunk * self.stages + self.stage
        if letter == "F":
            return [(ACTIVATION, virtual_stage - 1, micro_batch)] if virtual_stage else []
        if letter == "W" or virtual_stage == self.last_virtual_stage:
            return []
        return [(GRADIENT, virtual_stage, micro_batch)]

    def makes(self, stage_pass: Pass) -> list[Message]:
        """Return a list with the message that a pass sends; [] if it sends none.

        A virtual stage is a chunk of layers; the virtual stages are numbered in the order of the
        forward pass. A message is (letter, link, micro-batch), where link n connects the virtual
        stages n and n + 1. Example: the passes of micro-batch 5 on virtual stage 3 send

            forward pass "F"             [("a", 3, 5)]    activation to 4; [] on the last
            backward pass "B" or "I"     [("g", 2, 5)]    gradient to 2; [] on virtual stage 0
            gradients of weights "W"     []
        """
        letter, micro_batch, chunk = stage_pass
        virtual_stage = chunk * self.stages + self.stage
        if letter == "F":
            if virtual_stage == self.last_virtual_stage:
                return []
            return [(ACTIVATION, virtual_stage, micro_batch)]
        if letter == "W" or virtual_stage == 0:
            return []
        return [(GRADIENT, virtual_stage - 1, micro_batch)]


def _with_early_receives(
    order: Sequence[Pass], neighbours: _Neighbours, planned: PassOrder | None = None
) -> Iterator[Op]:
    """Yield a stage's operations, with each receive posted (started) long before it is awaited.

    A receive is posted at the step's start, or after the send that a written order names for it.
    Before a pass comes the wait for its message, and after the pass the post of the message that it
    sends.

    Args:
        order: Passes of the stage.
        neighbours: Messages of the stage.
        planned: Written order of passes. It says after which send each receive is posted. None: post
            all at the step's start.
    """
    # Message sent -> receives to post then; None for the step's start.
    posts_after: dict[Message | None, list[Op]] = defaultdict(list)
    for stage_pass in order:
        for message in neighbours.needs(stage_pass):
            sent = _sent_before(message, planned) if planned else None
            posts_after[sent].append(("post", message))
    yield from posts_after[None]
    for stage_pass in order:
        for message in neighbours.needs(stage_pass):
            yield ("wait", message)
        yield stage_pass
        for message in neighbours.makes(stage_pass):
            yield ("post", message)
            yield from posts_after[message]


def _sent_before(message: Message, planned: PassOrder) -> Message | None:
    """Return the message after which the receive of another is posted; None at the step's start.

    A written order of passes names a pass of the receiving stage. The receive is posted after the
    message that this pass sends, to the neighbour from which the receive is. So a gradient is sent if
    an activation is received, and vice versa, and both pass the same link.

    Args:
        message: Message to receive: (letter, link, micro-batch).
        planned: Written order of passes.
    """
    letter, link, micro_batch = message
    sending_pass = planned.posted_after(link, _PASS_OF[letter], micro_batch)
    if not sending_pass:
        return None
    _, sent_micro_batch = sending_pass
    opposite = GRADIENT if letter == ACTIVATION else ACTIVATION
    return opposite, link, sent_micro_batch


def _megatron_1f1b(order: Sequence[Pass], neighbours: _Neighbours, warm_up: int) -> Iterator[Op]:
    """Yield the operations of megatron-core's 1F1B schedule.

    In the steady state a pass sends its output and receives the next pass's input at the same time.

    Args:
        order: Passes of the stage.
        neighbours: Messages of the stage.
        warm_up: Forward passes before the steady state.
    """
    steady = range(warm_up, len(order) - warm_up)
    for index, stage_pass in enumerate(order):
        follows_pair = index in steady and index - 1 in steady
        begins_pair = index in steady and index + 1 in steady
        if not follows_pair:  # else the exchange before has received the input
            yield from _exchange(neighbours.needs(stage_pass))
        yield stage_pass
        received = neighbours.needs(order[index + 1]) if begins_pair else []
        yield from _exchange(neighbours.makes(stage_pass), received)


def _deepspeed_1f1b(neighbours: _Neighbours, micro_batches: int) -> Iterator[Op]:
    """Yield the operations of DeepSpeed's 1F1B (deepspeed.runtime.pipe.schedule.TrainSchedule).

    Time slots for a forward and for a backward pass alternate; DeepSpeed calls them steps. An even
    stage has its forward passes in even slots, an odd stage in odd slots. Each slot sends the output
    of the previous slot and receives the input of its own pass. A forward slot sends first, a
    backward slot receives first.
    """
    stage = neighbours.stage
    stages = neighbours.stages
    to_send: list[Message] = []  # output of the step before
    for step in range(2 * (micro_batches + neighbours.last_virtual_stage)):
        # The forward pass of micro-batch m is in slot stage + 2 m, its backward pass in slot
        # 2 stages - stage - 1 + 2 m.
        is_forward = step % 2 == stage % 2
        if is_forward:
            micro_batch = (step - stage) // 2
        else:
            micro_batch = (step - 2 * stages + stage + 1) // 2
        # Outside this range the stage has no pass: at the beginning and at the end of the step.
        current: list[Pass] = []
        if 0 <= micro_batch < micro_batches:
            current = [("F" if is_forward else "B", micro_batch, 0)]
        to_receive = [message for stage_pass in current for message in neighbours.needs(stage_pass)]
        if is_forward:
            yield from _exchange(to_send)
            yield from _exchange(to_receive)
        else:
            yield from _exchange(to_receive)
            yield from _exchange(to_send)
        yield from current
        to_send = [message for stage_pass in current for message in neighbours.makes(stage_pass)]
    yield from _exchange(to_send)


def _exchange(messages: Sequence[Message], received: Sequence[Message] = ()) -> Iterator[Op]:
    """Yield the operations that start messages, and then wait for all of them.

    ("post", message) starts a message, ("wait", message) waits for its end.

    Args:
        messages: Messages to send, or to receive.
        received: Further messages, to receive from the neighbour to which `messages` are sent.
    """
    for message in messages:
        yield ("post", message)
    for message in received:
        # The receive begins with a notice to the neighbour that this stage is ready. The notice uses
        # the connection that also carries `messages`, so it leaves after them: they follow in the post.
        yield ("post", message, *messages)
    for message in (*messages, *received):
        yield ("wait", message)
