"""Sends messages between pipeline stages without waiting, and posts their receives in advance.

A pipeline engine usually sends an activation or a gradient with a blocking call, so a stage idles while its
message crosses a slow link. A Mailbox overlaps the transfer with the passes of both stages. Gloo transfers
nothing before the receiver has posted its receive, and NCCL's sender waits for it: so receives are posted
some passes before the message is needed.

A step with known messages:

    1  begin()               decides how many passes ahead to post the receives from each neighbour
                             (receive_order.py)
    2  recv()                waits for the oldest posted receive of a neighbour, and copies it into the
                             engine's tensor
    3  send()                starts to send a tensor, and keeps the tensor
    4  post_due_receives()   posts the receives that are due after a forward or backward pass
    5  release_sent()        releases kept tensors: a later message of the neighbour shows that it has them
    6  end()                 waits for the remaining sends

Steps 2 to 5 are repeated for every forward and backward pass. Posting a receive needs the shape and dtype of
the message. If the engine does not declare them (expect()), the first step runs between start_recording() and
finish_recording(): its messages are sent and received with blocking calls, and their shapes and dtypes are
recorded.

Invariant: both ranks of a pair post the messages of one direction in the same order, and each direction has a
process group of its own.

No rank waits for ever: both stages post and send their messages in the same order (receive_order.py). It is
chosen so that no rank waits for ever even if each operation of a rank waits for the operation before it. So
CUDA streams, hardware queues and gloo's threads may run the operations in any order.

With NCCL, isend and irecv run on the stream of their process group. A send that no rank waits for delays no
other stream, but its tensor must outlive it. Before a received buffer is copied, the current stream waits
for the receive.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.pairs import pair_group
from holmes_ext.runtime.groups.wire import PLAIN
from holmes_ext.runtime.watch import failure

if TYPE_CHECKING:
    from holmes_ext.runtime.groups.receive_order import (
        ListedPostingRule,
        PipelineOrder,
        PostingRule,
    )
    from holmes_ext.runtime.groups.wire import Wire

_BLOCKING_ADVICE = "--holmes-inflight off leaves sending to the engine"


class MessageSpec(NamedTuple):
    """Shape and dtype of a message."""

    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


def message_spec(tensor: Any) -> MessageSpec:
    """Return the shape and dtype of a tensor, as it is sent or received."""
    return MessageSpec(tuple(tensor.shape), tensor.dtype)


class _SentMessage(NamedTuple):
    """Tensor that was sent to a neighbouring stage without waiting, and the handle of its send."""

    micro_batch: int
    work: Any
    tensor: Any  # kept until the work has ended


class _PostedReceive(NamedTuple):
    """Receive of a message that was started before the message is needed, with its buffer."""

    buffer: Any
    work: Any


class _StagePair(NamedTuple):
    """Numbers of the pipeline stages of this rank and of a neighbouring rank."""

    this_stage: int
    neighbour_stage: int


def of_pairs(
    pairs: Iterable[tuple[int, int]], rank: int, stages: Mapping[int, int], pipeline: Any
) -> Mailbox:
    """Return an object that sends and receives this rank's pipeline messages, with new groups.

    The object, a Mailbox, sends without waiting and posts receives in advance. For each neighbour,
    a new process group carries activations to the later stage, and another carries gradients back.
    The two ranks of a pair must make the groups in the same order, so the pairs are sorted.

    Args:
        pairs: Pairs of global ranks, the rank of the earlier stage first.
        rank: Global rank of this process.
        stages: Global rank -> its pipeline stage.
        pipeline: Process group of the pipeline. The new groups get its backend, timeout and settings.
    """
    groups = {}
    for pair in sorted(pairs):
        if rank not in pair:
            continue
        earlier_rank, later_rank = pair
        activations = pair_group(pair, "pipeline activations", pipeline)
        gradients = pair_group(pair, "pipeline gradients", pipeline)
        if rank == earlier_rank:
            groups[later_rank, "send"] = activations
            groups[later_rank, "recv"] = gradients
        else:
            groups[earlier_rank, "send"] = gradients
            groups[earlier_rank, "recv"] = activations

    # Neighbour -> (stage of this rank, stage of the neighbour).
    ends = {neighbour: (stages[rank], stages[neighbour]) for neighbour, _ in groups}
    return Mailbox(groups, ends)


class Mailbox:
    """Sender and receiver of one rank's messages to and from its neighbouring pipeline stages.

    The docstring of the module describes the order of the calls. A neighbour is identified by its global
    rank.
    """

    def __init__(self, groups: dict[tuple[int, str], Any], ends: Mapping[int, tuple[int, int]]):
        """Create the sender and receiver of a rank's messages to its neighbouring pipeline stages.

        The pipeline engine may declare them before a step, with expect() and announce(). Otherwise
        the first step receives with blocking calls and records them from the tensors
        (start_recording()).

        Args:
            groups: (neighbour, "send" or "recv") -> process group of that direction.
            ends: Neighbour -> (pipeline stage of this rank, pipeline stage of the neighbour).
        """
        self._groups = groups
        self._stages = {peer: _StagePair(*stages) for peer, stages in ends.items()}
        #: Neighbour -> 1 if it runs the next stage, -1 if it runs the stage before.
        #: Receives are posted in advance only between adjacent stages.
        self.neighbours: dict[int, int] = {}
        for peer, stages in self._stages.items():
            distance = stages.neighbour_stage - stages.this_stage
            if abs(distance) == 1:
                self.neighbours[peer] = distance
        #: Neighbour -> encoding of the messages to and from it. PLAIN sends tensors as they are;
        #: others compress them.
        self.wire_to: Callable[[int], Wire] = lambda peer: PLAIN

        #: Whether a step runs whose receives are posted in advance.
        self.is_open = False
        #: Whether a step runs whose messages are recorded.
        self.is_recording = False
        #: The pass that sends: "F" or "B", and its micro-batch. Set by the caller of send().
        self.sending_pass: tuple[str, int] = ("", 0)

        # Neighbour -> shapes and dtypes of the messages of a micro-batch.
        self._announced: dict[int, Sequence[MessageSpec]] = {}  # messages to the neighbour
        self._expected: dict[int, Sequence[MessageSpec]] = {}  # messages from the neighbour

        # Neighbour -> shape and dtype of each message received in a step of blocking calls.
        self._recorded: dict[int, list[MessageSpec]] = {}

        # State of the current step. Keys are neighbours, except in _sent_messages.
        self._micro_batches = 0  # of the whole step
        self._device_tensor: Any = None  # receive buffers are allocated on its device

        # When to post receives: before or after each pass, and how many.
        self._posting_rules: dict[int, PostingRule | ListedPostingRule] = {}
        # "F" or "B" (the pass that sent) -> messages whose tensors are still kept.
        self._sent_messages: dict[str, deque[_SentMessage]] = defaultdict(deque)

        # Receives that recv() has not used yet, the oldest first.
        self._posted: dict[int, deque[_PostedReceive]] = defaultdict(deque)
        self._posted_micro_batches: Counter[int] = Counter()  # micro-batches with posted receives
        self._received_messages: Counter[int] = Counter()  # number of calls of recv()
        self._checked_messages: Counter[int] = Counter()  # sent messages compared with _announced

    # Messages of a micro-batch

    def expect(self, specs: Sequence[MessageSpec], peer: int) -> None:
        """Declare the messages that a neighbour sends for every micro-batch.

        Args:
            specs: Shape and dtype of each message of a micro-batch, in the order of sending.
            peer: Rank of the neighbour.
        """
        self._expected[peer] = specs

    def announce(self, specs: Sequence[MessageSpec], peer: int) -> None:
        """Declare the messages that this rank sends to a neighbour for every micro-batch.

        Args:
            specs: Shape and dtype of each message of a micro-batch, in the order of sending. send() rejects
                other messages. An empty sequence allows any message.
            peer: Rank of the neighbour.
        """
        self._announced[peer] = specs
        self._checked_messages[peer] = 0

    def start_recording(self) -> None:
        """Begin a step with blocking sends and receives, and record the shapes of received messages.

        Later steps need the shapes and dtypes to post receives in advance.
        """
        self.is_recording = True
        self._checked_messages.clear()
        self._recorded = {peer: [] for peer in self.neighbours}

    def discard_recorded(self, peer: int) -> None:
        """Drop the shapes recorded so far for a neighbour, because later steps lack these messages.

        DeepSpeed's first step also sends the shapes of the activations that follow. These messages come only
        once, so no receives are posted for them in later steps.
        """
        if self.is_recording:
            self._recorded[peer] = []

    def finish_recording(self, micro_batches: int) -> None:
        """End the step begun by start_recording(), and expect the same messages in all later steps.

        A neighbour's messages must have the same shapes and dtypes in every micro-batch. Later steps post
        receives of these shapes before the messages arrive.

        Args:
            micro_batches: Micro-batches of the step that ends.

        Raises:
            HolmesError: a neighbour did not send the same messages for every micro-batch.
        """
        for (
            peer,
            specs,
        ) in self._recorded.items():  # shapes and dtypes of the step, in order of arrival
            specs_per_micro_batch = specs[: len(specs) // micro_batches]  # of the first micro-batch
            if specs != specs_per_micro_batch * micro_batches:
                stages = self._stages[peer]
                raise HolmesError(
                    f"stage link from stage {stages.neighbour_stage} to stage {stages.this_stage}: "
                    f"rank {peer} does not send the same of each micro-batch; {_BLOCKING_ADVICE}"
                )
            self.expect(specs_per_micro_batch, peer)
        self.is_recording = False

    @property
    def has_message_specs(self) -> bool:
        """True if expect() was called for all neighbours, by the engine or by finish_recording().

        Then the shapes and dtypes of all messages are known, and begin() may be called. All ranks of a
        pipeline have the same answer.
        """
        return self.neighbours.keys() <= self._expected.keys()

    def clear_message_specs(self) -> None:
        """Delete the shapes and dtypes of expected messages, because the next step may have other ones."""
        self._expected.clear()

    # A step with known messages

    def begin(self, order: PipelineOrder, micro_batches: int, like: Any) -> None:
        """Begin a training step that posts its receives (irecv) some passes before their use.

        A posted receive needs a buffer, so the shapes and dtypes of all messages must be known
        (has_message_specs). Either the engine has declared them by expect(), or the mailbox has
        recorded them in a step of blocking receives (start_recording() to finish_recording()).

        Args:
            order: Order of the passes and messages of all pipeline stages.
            micro_batches: Micro-batches of the step.
            like: Any tensor; receive buffers are allocated on its device.
        """
        self.is_open = True
        self._device_tensor = like
        self._micro_batches = micro_batches
        current = session.active()
        if current is not None:
            current.in_flight = order.in_flight  # for the comparison of the job with its plan
        self._posted_micro_batches.clear()
        self._received_messages.clear()
        self._checked_messages.clear()
        self._posting_rules = {}
        for peer in self.neighbours:
            stages = self._stages[peer]
            # The rule says how many receives from this neighbour are posted before and after each pass.
            self._posting_rules[peer] = order.posting_rule(
                stages.this_stage, stages.neighbour_stage, micro_batches
            )

    def send(self, tensor: Any, peer: int) -> None:
        """Start to send a tensor to a neighbour, and return before it is sent.

        Only in a first step that records the shapes of messages (start_recording()) is the send blocking: the
        receiver cannot post receives in advance before it knows these shapes.

        Raises:
            HolmesError: the engine has declared another shape or dtype of this message, by announce().
        """
        import torch.distributed as dist

        self._check_announced(tensor, peer)
        encoded = self.wire_to(peer).outgoing(tensor)  # compressed, or `tensor` itself
        group = self._groups[peer, "send"]
        if self.is_recording:
            dist.send(encoded, peer, group=group)
            return
        kind, micro_batch = self.sending_pass  # set by the caller: "F" or "B", and its micro-batch
        work = dist.isend(encoded, peer, group=group)
        self._sent_messages[kind].append(_SentMessage(micro_batch, work, tensor=encoded))

    def recv(self, tensor: Any, peer: int) -> None:
        """Wait for the next message of a neighbour, and copy it into `tensor`.

        The receive (irecv) was usually posted some passes before, into a buffer of its own. A first
        step that records the shapes of messages (start_recording()) has no such buffers: a blocking
        receive fills `tensor` directly. With NCCL, the current stream waits, not the host.

        Raises:
            HolmesError: another shape or dtype was expected, or the connection is broken.
        """
        if self.is_recording:
            self._receive_and_record(tensor, peer)
            return
        messages_per_micro_batch = len(self._expected[peer])
        micro_batch = self._received_messages[peer] // messages_per_micro_batch
        self._received_messages[peer] += 1

        # posted_before() returns how many micro-batches must have posted receives before this pass.
        # Missing receives are posted now. The receive of this message may be among them.
        self._post_receives(peer, self._posting_rules[peer].posted_before(micro_batch))
        posted = self._posted[peer].popleft()

        # `encoded` takes the message as it is sent. decode() then fills `tensor` from it.
        encoded, decode = self.wire_to(peer).incoming(tensor)
        self._check_expected(posted.buffer, encoded, peer)
        with self._naming_stage_link(peer):
            posted.work.wait()
        encoded.copy_(posted.buffer)
        decode()

    def post_due_receives(self, kind: str, index: int) -> None:
        """Post the receives that are due after a pass, whose messages have all been sent.

        Args:
            kind: "F" for a forward pass, "B" for a backward pass.
            index: Micro-batch of the pass.
        """
        for peer, rule in self._posting_rules.items():
            self._post_receives(peer, rule.posted_after(kind, index))

    def release_sent(self, kind: str, index: float) -> None:
        """Wait for the sends of forward or backward passes up to a micro-batch, and release their tensors.

        The waits return at once if the neighbour has received the tensors. So the caller calls this after it
        has received a message that the neighbour sends only after it has received them.

        Args:
            kind: "F" for the activations of forward passes, "B" for the gradients of backward passes.
            index: The last micro-batch whose tensors are released; infinity for all.
        """
        messages = self._sent_messages[kind]
        while messages and messages[0].micro_batch <= index:
            messages.popleft().work.wait()  # afterwards nothing refers to the tensor

    def end(self) -> None:
        """Wait until all messages of the training step have been sent, and end the step."""
        for kind in self._sent_messages:
            self.release_sent(kind, index=inf)
        self.is_open = False

    @property
    def by_peer(self) -> dict[int, Any]:
        """Neighbour -> a single process group for both directions: the group that carries activations.

        Both ranks of a pair get the same group.
        """
        groups = {}
        for peer, stages in self._stages.items():
            is_next_stage = stages.this_stage < stages.neighbour_stage
            direction = "send" if is_next_stage else "recv"
            groups[peer] = self._groups[peer, direction]
        return groups

    def _receive_and_record(self, tensor: Any, peer: int) -> None:
        """Receive a message into `tensor` with a blocking call, and record its shape and dtype."""
        import torch.distributed as dist

        encoded, decode = self.wire_to(peer).incoming(tensor)
        self._recorded[peer].append(message_spec(encoded))
        with self._naming_stage_link(peer):
            dist.recv(encoded, peer, group=self._groups[peer, "recv"])
        decode()

    def _post_receives(self, peer: int, micro_batches: int) -> None:
        """Start the receives (irecv) of the step's first micro-batches from a neighbour, if not started yet.

        Args:
            micro_batches: Number of micro-batches, counted from the beginning of the step.
        """
        import torch.distributed as dist

        # Posting rules may count micro-batches past the end of the step.
        last = min(micro_batches, self._micro_batches)
        while self._posted_micro_batches[peer] < last:
            for shape, dtype in self._expected[peer]:
                buffer = self._device_tensor.new_empty(shape, dtype=dtype)
                work = dist.irecv(buffer, peer, group=self._groups[peer, "recv"])
                self._posted[peer].append(_PostedReceive(buffer, work))
            self._posted_micro_batches[peer] += 1

    def _check_announced(self, tensor: Any, peer: int) -> None:
        """Raise an error if a tensor that is sent has another shape or dtype than declared.

        The engine declared, with announce(), the messages that each micro-batch sends to `peer`.
        Without this check, gloo would fill the receiver's buffer only in part, or end the process.
        """
        specs = self._announced.get(peer)  # of each message of a micro-batch, in order
        if not specs:
            return
        micro_batch, position = divmod(self._checked_messages[peer], len(specs))
        self._checked_messages[peer] += 1
        announced = MessageSpec(*specs[position])
        actual = message_spec(tensor)
        if actual != announced:
            stages = self._stages[peer]
            raise HolmesError(
                f"stage link from stage {stages.this_stage} to stage {stages.neighbour_stage} "
                f"(to rank {peer}): micro-batch {micro_batch} is {actual}, expected {announced}; "
                "give all micro-batches the same shape (pad them, leave out a shorter last one)"
            )

    def _check_expected(self, buffer: Any, encoded: Any, peer: int) -> None:
        """Raise an error if the engine's tensor does not fit the receive that was posted for its message."""
        expected = message_spec(buffer)
        wanted = message_spec(encoded)
        if wanted != expected:
            stages = self._stages[peer]
            raise HolmesError(
                f"stage link from stage {stages.neighbour_stage} to stage {stages.this_stage}: a message "
                f"of rank {peer} was {expected} in every step so far, but is {wanted} now; "
                f"{_BLOCKING_ADVICE}"
            )

    @contextmanager
    def _naming_stage_link(self, peer: int) -> Iterator[None]:
        """Turn an error of a receive into a HolmesError that names both stages and the cause."""
        try:
            yield
        except RuntimeError as error:
            stages = self._stages[peer]
            stage_link = (
                f"stage link from stage {stages.neighbour_stage} (rank {peer}) "
                f"to stage {stages.this_stage}"
            )
            # broken() returns the text of an error: the stage link that broke, and the reason. If
            # another rank has ended because of wrong user input, it returns that rank's message
            # instead, with the prefix "holmes: ". The prefix is removed, since printing a
            # HolmesError adds it.
            message = failure.broken(stage_link, str(error))
            raise HolmesError(message.removeprefix(failure.INPUT)) from error
