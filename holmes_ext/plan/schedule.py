"""Order of the passes (forward, backward) of every pipeline stage, as a plan stores it and an engine runs it.

A text has a letter and the number of a micro-batch for each pass, such as "F0 F1 I0 F2 W0 ...". The
letters are those of torch.distributed.pipelining:

    F    forward pass
    B    whole backward pass
    I    first part of a split backward pass: gradients of the input. The previous stage waits for them
    W    second part: gradients of the weights. No stage waits for them, so they can fill idle time
         (zero bubble; Qi et al. 2024, arXiv 2401.10241)
    g    not a pass: the stage posts the receive of a gradient

A stage runs the micro-batches of each kind of pass in ascending order, so weight gradients are summed in
the same order as in the engine's own schedule.

A stage link is the connection of two neighbouring stages. With NCCL, both of its ends must launch their
messages in the same order (runtime/groups/receive_order.py). The "g" entries define this order. With gloo
there are no "g" entries.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from holmes_ext.errors import HolmesError
from holmes_ext.words import counted

#: (letter, micro-batch)
OnePass = tuple[str, int]
LETTERS = "FBIW"
#: (stage, letter, micro-batch) -> seconds. The letter is "F", "I" or "W"; "I" also stands for "B",
#: because both send a gradient to the previous stage.
Ends = dict[tuple[int, str, int], float]
#: Change in the number of micro-batches whose activations a stage holds, by pass.
_HELD = {"F": 1, "B": -1, "I": 0, "W": -1}
#: Pass of a micro-batch that must come before each pass, on the same stage.
_NEEDED = {"B": "F", "I": "F", "W": "I"}


def before(order: Sequence[OnePass], counted: str, of_letters: str) -> tuple[int, ...]:
    """Return how many passes with `counted` letters come before each pass with a letter of `of_letters`.

    For the order F0 F1 B0 F2 B1, counted "F" and of_letters "B", the result is (2, 3): two forward passes
    come before B0, three before B1.

    Args:
        order: Passes of the stage.
        counted: Letters of the passes that are counted.
        of_letters: Letters of the passes that get a number; none of them is in `counted`.
    """
    counts = accumulate(letter in counted for letter, _ in order)  # up to each pass
    return tuple(count for (letter, _), count in zip(order, counts) if letter in of_letters)


@dataclass(frozen=True)
class Times:
    """Times of passes and messages of a micro-batch, in seconds, by stage."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]  # gradients of the input
    weights: tuple[float, ...]  # gradients of the weights
    transfer: tuple[float, ...]  # of an activation, by stage link
    micro_batches: int
    most: tuple[float, ...]  # micro-batches whose activations fit the memory, from F to B or W

    def of(self, letter: str, stage: int) -> float:
        """Return the seconds of a pass on a stage: "F" forward, "B" backward, or its parts "I" and "W"."""
        if letter == "F":
            return self.forward[stage]
        inputs_s = self.inputs[stage] if letter in "BI" else 0.0
        weights_s = self.weights[stage] if letter in "BW" else 0.0
        return inputs_s + weights_s


@dataclass(frozen=True)
class PassOrder:
    """Passes of every stage in order, and optionally the order of the messages of each stage link.

    Raises:
        HolmesError: An engine could not run these passes.
    """

    stages: tuple[tuple[OnePass, ...], ...]
    #: NCCL needs a common order of the messages (activations and gradients) of a stage link. It is
    #: given by the number of activations that precede each gradient: activations_before[stage
    #: link][micro-batch of the gradient]. (): messages need no order (gloo).
    activations_before: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> PassOrder:
        """Return the passes in a plan's texts, one text for each stage.

        Raises:
            HolmesError: A text is bad, or an engine could not run the passes.
        """

        def parse_entry(stage: int, word: str) -> OnePass:
            letter = word[:1]
            number = word[1:]
            if letter not in {*LETTERS, "g"} or not number.isdecimal():
                raise HolmesError(
                    f"passes of stage {stage}: {word!r} is not a pass such as F0, B0, I0 or W0"
                )
            return letter, int(number)

        orders = [
            [parse_entry(stage, word) for word in text.split()] for stage, text in enumerate(texts)
        ]

        # "g0" is no pass: there the stage posts the receive of gradient 0. The forward passes before it
        # send the activations that precede this gradient. The last stage receives no gradients.
        activations_before = tuple(
            before(order, counted="F", of_letters="g") for order in orders[:-1]
        )
        has_order = any(activations_before)  # without "g" entries (gloo) messages have no order
        passes_of = (tuple(entry for entry in order if entry[0] != "g") for order in orders)
        return cls(tuple(passes_of), activations_before if has_order else ())

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the text of each stage, such as "F0 F1 g0 B0 ...", in the form that parse() reads.

        "g0": the stage posts the receive of gradient 0, after the forward pass that sends the
        last activation before the gradient. With activations_before (2, 2, 3), two activations
        precede gradients 0 and 1, and three precede gradient 2: "F0 F1 g0 g1 ... F2 g2".
        """
        result = []
        for stage, order in enumerate(self.stages):
            activations_before: tuple[int, ...] = ()
            if stage < len(self.activations_before):
                activations_before = self.activations_before[stage]
            words: list[str] = []
            for letter, number in order:
                words.append(f"{letter}{number}")
                if letter == "F":
                    sent = number + 1  # activations that the stage has sent when this pass ends
                    # Gradients that follow after exactly `sent` activations. As the numbers are
                    # sorted, they form a range. It is empty if messages have no order.
                    first = bisect_left(activations_before, sent)
                    stop = bisect_right(activations_before, sent)
                    words += [f"g{gradient}" for gradient in range(first, stop)]
            result.append(" ".join(words))
        return tuple(result)

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches per step."""
        return sum(letter == "F" for letter, _ in self.stages[0])

    @property
    def splits(self) -> bool:
        """Return whether backward passes are split in two: gradients of the inputs, then of the weights."""
        return any(letter == "W" for order in self.stages for letter, _ in order)

    def __post_init__(self) -> None:
        for stage, order in enumerate(self.stages):
            self._check_stage(stage, order)
        for _ in self.in_order():
            pass  # raises if the stages would wait for each other
        for stage_link, activations_before in enumerate(self.activations_before):
            self._check_message_order(stage_link, activations_before)

    def _check_stage(self, stage: int, order: Sequence[OnePass]) -> None:
        """Raise HolmesError if a stage lacks passes, or if a pass comes before another that it needs."""
        wanted = [*range(self.micro_batches)]
        # "B" is both parts of a backward pass, "I" and "W" are the two parts.
        kinds = {"F": "forward", "BI": "input-gradient", "BW": "weight-gradient"}
        for letters, name in kinds.items():
            numbers = [number for letter, number in order if letter in letters]
            if numbers != wanted:
                needed = f"micro-batches 0 to {len(wanted) - 1}, each once, in order"
                raise HolmesError(f"passes of stage {stage}: its {name} passes must be {needed}")
        position_of = {entry: position for position, entry in enumerate(order)}
        for letter, number in order:
            if letter not in _NEEDED:
                continue  # a forward pass needs no other pass of its stage
            needed = _NEEDED[letter]
            if position_of[letter, number] < position_of[needed, number]:
                raise HolmesError(
                    f"passes of stage {stage}: {letter}{number} comes before {needed}{number}"
                )

    def _check_message_order(self, stage_link: int, activations_before: Sequence[int]) -> None:
        """Raise HolmesError if the passes of both stages do not allow an order of a stage link's messages.

        The later stage makes a gradient after some forward passes, and needs their activations first. The
        earlier stage waits for the gradient in a backward pass, and sends the activations of the following
        forward passes only after it. So the number of activations before the gradient has two limits:
        at least the later stage's forward passes before that backward pass, at most the earlier
        stage's.

        Args:
            stage_link: Number of the stage link.
            activations_before: Number of activations that are sent before the gradient of each micro-batch.
        """
        # Number of forward passes before each backward pass, by micro-batch: limits of the numbers.
        earliest = self._forwards_before_backward[stage_link + 1]  # later stage, lower limits
        latest = self._forwards_before_backward[stage_link]  # earlier stage, upper limits
        is_complete = len(activations_before) == len(latest)
        is_ascending = list(activations_before) == sorted(activations_before)
        is_within_limits = all(
            low <= count <= high for low, count, high in zip(earliest, activations_before, latest)
        )
        if not (is_complete and is_ascending and is_within_limits):
            raise HolmesError(
                f"passes of stage {stage_link}: a gradient's receive (g) must follow the "
                f"forwards that the next stage needs to send it, and precede its backward"
            )

    @cached_property
    def _forwards_before_backward(self) -> tuple[tuple[int, ...], ...]:
        """Return, by stage and micro-batch, the number of forward passes before its backward pass."""
        return tuple(before(order, counted="F", of_letters="BI") for order in self.stages)

    def receive_orders(self, stage_link: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the order of activations and gradients by which each stage of a link posts its receives.

        On a link, activations go one way and gradients the other way. An order mixes both. It has
        for each gradient the number of activations before it: a0 a1 g0 a2 g1 is (2, 3).
        With NCCL both stages use the same order. With gloo, a stage posts a receive after its own sends
        that precede the message in the order of the sending stage's passes.

        Args:
            stage_link: Number of the stage link. Link i connects stages i and i + 1.

        Returns:
            The order by which stage i + 1 receives activations, and the order by which stage i
            receives gradients.
        """
        if self.activations_before:
            common_order = self.activations_before[stage_link]
            return common_order, common_order
        # A stage sends an activation after each forward pass, or a gradient after each backward pass.
        # So the numbers of forward passes before its backward passes are the order of its messages.
        earlier_stage = self._forwards_before_backward[stage_link]  # sends the activations
        later_stage = self._forwards_before_backward[stage_link + 1]  # sends the gradients
        return earlier_stage, later_stage

    def posted_after(self, stage_link: int, received: str, number: int) -> OnePass | None:
        """Return the pass of the receiving stage after which it posts the receive of a message.

        On a stage link, activations go one way and gradients the other way, in a common order (see
        receive_orders). So a stage of the link sends some messages of the order and receives the
        others. It posts a receive after sending the last of its messages before the received one.
        In the order a0 a1 g0, gradient g0 follows activation a1. So the stage that sends activations
        posts the receive of g0 after the forward pass that makes a1, "F" of micro-batch 1.

        Args:
            stage_link: Number of the stage link.
            received: "F" for the receive of an activation, "B" for that of a gradient.
            number: Micro-batch of the received message.

        Returns:
            (letter, micro-batch) of the pass; None: the receive is posted when the step begins.
        """
        # For each gradient, the number of activations before it.
        when_receiving_activations, when_receiving_gradients = self.receive_orders(stage_link)
        if received == "B":
            # The receiving stage sends activations. The last of n activations has number n - 1. n is
            # at least 1, because a gradient follows the activation of its own micro-batch.
            activations_sent = when_receiving_gradients[number]
            return "F", activations_sent - 1
        # The receiving stage sends gradients. Those before activation `number` have at most `number`
        # activations before them. The numbers of activations ascend, so bisect_right counts these
        # gradients.
        gradients_sent = bisect_right(when_receiving_activations, number)
        if gradients_sent == 0:
            return None
        return "B", gradients_sent - 1

    def in_order(self) -> Iterator[tuple[int, OnePass]]:
        """Yield (stage, pass) of all passes, each after those that it needs.

        Raises:
            HolmesError: Stages would wait for each other for ever.
        """
        position = [0] * len(self.stages)  # of the next pass of each stage
        ended: set[tuple[int, str, int]] = set()  # (stage, letter, micro-batch)
        while any(position[stage] < len(order) for stage, order in enumerate(self.stages)):
            # Each stage runs as many passes as it has messages for. If none can run any, all wait forever.
            is_stuck = True
            for stage, order in enumerate(self.stages):
                while position[stage] < len(order):
                    letter, number = order[position[stage]]
                    if not self._message_was_sent(stage, letter, number, ended):
                        break
                    # "B" counts as "I": both make the gradient that the previous stage waits for.
                    ended.add((stage, _recorded_letter(letter), number))
                    position[stage] += 1
                    is_stuck = False
                    yield stage, (letter, number)
            if is_stuck:
                # Name the first pass that is left, of the first stage that has passes left.
                stage = next(
                    stage for stage, order in enumerate(self.stages) if position[stage] < len(order)
                )
                letter, number = self.stages[stage][position[stage]]
                raise HolmesError(
                    f"passes of stage {stage}: {letter}{number} deadlocks with a neighbouring stage"
                )

    def _message_was_sent(
        self, stage: int, letter: str, number: int, ended: Collection[tuple[int, str, int]]
    ) -> bool:
        """Return whether the message that a pass needs has been sent, or whether it needs none.

        A forward pass ("F") needs the activation of the previous stage. A backward pass ("B", or the
        first half "I" of a split backward pass) needs the gradient that the next stage's "B" or "I"
        makes. The second half "W" needs no message.

        Args:
            stage: Stage of the pass.
            letter: Letter of the pass.
            number: Micro-batch of the pass.
            ended: (stage, letter, micro-batch) of the ended passes, with "I" in place of "B".
        """
        if letter == "F" and stage > 0:
            return (stage - 1, "F", number) in ended
        if letter in "BI" and stage < len(self.stages) - 1:
            return (stage + 1, "I", number) in ended
        return True

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Return the largest number of micro-batches whose activations each stage holds at once."""
        return tuple(max(accumulate(_HELD[letter] for letter, _ in order)) for order in self.stages)

    def ends(self, times: Times) -> list[float]:
        """Return when each stage has ended its last pass, in seconds; sends take no time of a stage."""
        end_of = self._pass_ends(times)
        result = []
        for stage, order in enumerate(self.stages):
            last_letter, last_micro_batch = order[-1]
            result.append(end_of[stage, _recorded_letter(last_letter), last_micro_batch])
        return result

    def _pass_ends(self, times: Times) -> Ends:
        """Compute when each pass of the step ends, in seconds since the step began.

        A pass begins when its stage is free and the message that it needs has arrived. If the
        messages have an order (NCCL), a message leaves only after its receive was posted.

        Args:
            times: Seconds of the passes and messages.

        Returns:
            (stage, letter, micro-batch) -> seconds since the step began. The letter is "F"
            (forward), "W" (weight gradients) or "I" (input gradients, or a whole backward pass).
        """
        clock = [0.0] * len(self.stages)  # when each stage has ended its latest pass
        last = len(self.stages) - 1
        ready: Ends = {}
        for stage, (letter, number) in self.in_order():
            begin = clock[stage]
            sender = stage - 1 if letter == "F" else stage + 1  # of the message that the pass needs
            if letter != "W" and 0 <= sender <= last:
                stage_link = min(stage, sender)
                # Pass of the sender that makes the message. "B" means "B" or "I" here: `ready` has
                # both as "I" (_recorded_letter).
                message = "F" if letter == "F" else "B"
                transfer_s = times.transfer[stage_link]
                leaves_s = ready[sender, _recorded_letter(message), number]
                posting_pass = None  # pass of this stage after which it posts the receive
                if self.activations_before:
                    posting_pass = self.posted_after(stage_link, message, number)
                if posting_pass is not None:
                    sent_letter, sent_number = posting_pass
                    posted_s = ready[stage, _recorded_letter(sent_letter), sent_number]
                    # The receive comes after the message that this stage sends in posting_pass. It
                    # is posted when that message has been transferred.
                    leaves_s = max(leaves_s, posted_s + transfer_s)
                begin = max(begin, leaves_s + transfer_s)
            end = begin + times.of(letter, stage)
            clock[stage] = end
            ready[stage, _recorded_letter(letter), number] = end
        return ready

    def in_one_order(self, times: Times) -> PassOrder:
        """Return these passes with a common order of the messages of each stage link, as NCCL needs.

        Each message gets a moment: halfway between the end of the pass that makes it and the
        beginning of the pass that needs it. The messages of a link are sorted by their moments, so
        a message waits little for others. The order is written as the number of activations
        before each gradient (`activations_before`).

        Args:
            times: Seconds of the passes and messages.
        """
        ends = self._pass_ends(times)
        begins: Ends = {}
        for stage, order in enumerate(self.stages):
            for letter, number in order:
                key = (stage, _recorded_letter(letter), number)
                begins[key] = ends[key] - times.of(letter, stage)

        def moments(sender: int, receiver: int, letter: str) -> list[float]:
            """Return twice the moment of each micro-batch's message; the factor keeps the order."""
            return [
                ends[sender, letter, number] + begins[receiver, letter, number]
                for number in range(self.micro_batches)
            ]

        counts_of_links = []  # by stage link and micro-batch: activations before the gradient
        for stage_link in range(len(self.stages) - 1):
            activations = moments(stage_link, stage_link + 1, "F")
            gradients = moments(stage_link + 1, stage_link, "I")  # "I" also stands for "B"
            # Limits that the passes of both stages set (see _check_message_order).
            least = self._forwards_before_backward[stage_link + 1]
            most = self._forwards_before_backward[stage_link]
            counts = []
            for moment, low, high in zip(gradients, least, most):
                earlier_activations = bisect_left(activations, moment)
                counts.append(min(max(earlier_activations, low), high))
            counts_of_links.append(tuple(counts))
        return replace(self, activations_before=tuple(counts_of_links))


def _recorded_letter(letter: str) -> str:
    """Return the letter under which the end of a pass is recorded: "I" for "B", else `letter` itself.

    Both "I" and "B" make the gradient that the previous stage waits for.
    """
    return "I" if letter == "B" else letter


#: (kind "F" or "B", micro-batch, chunk)
Pass = tuple[str, int, int]


def passes(
    stage: int,
    stages: int,
    micro_batches: int,
    virtual: int = 1,
    in_flight: int = 0,
    breadth_first: bool = False,
) -> list[Pass]:
    """Return the passes of a stage in order: 1F1B, interleaved or breadth-first.

    Args:
        stage: Number of the stage.
        stages: Number of stages.
        micro_batches: Micro-batches per step.
        virtual: Chunks per stage.
        in_flight: Micro-batches in flight under 1F1B; 0: stages - stage.
        breadth_first: Whether all micro-batches of a chunk run before the next chunk, as in torch's
            ScheduleLoopedBFS. (Its backward passes have another order, but take as long.)

    Raises:
        HolmesError: Interleaved, and the micro-batches are not divisible by the stages.
    """
    if breadth_first:
        forward_chunks = [("F", chunk) for chunk in range(virtual)]
        backward_chunks = [("B", chunk) for chunk in reversed(range(virtual))]
        return [
            (kind, micro_batch, chunk)
            for kind, chunk in (*forward_chunks, *backward_chunks)
            for micro_batch in range(micro_batches)
        ]
    if virtual == 1:
        # Forward passes before the first pair of a forward and a backward pass.
        warm_up = min((in_flight or stages - stage) - 1, micro_batches)
        return _one_forward_one_backward(
            forward=[("F", micro_batch, 0) for micro_batch in range(micro_batches)],
            backward=[("B", micro_batch, 0) for micro_batch in range(micro_batches)],
            warm_up=warm_up,
        )
    if micro_batches % stages:
        count = counted(micro_batches, "micro-batch", "are")
        raise HolmesError(f"interleaved: {count} not divisible by {stages} pipeline stages")
    total = micro_batches * virtual  # forward passes of all chunks
    warm_up = total
    if micro_batches > stages:
        # Megatron's interleaved schedule (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
        warm_up = min(total, (stages - stage - 1) * 2 + (virtual - 1) * stages)
    forward = []
    backward = []
    for index in range(total):
        # Each chunk runs as many micro-batches as there are stages before the next chunk follows.
        chunk = index % (stages * virtual) // stages
        micro_batch = index // (stages * virtual) * stages + index % stages
        forward.append(("F", micro_batch, chunk))
        backward.append(("B", micro_batch, virtual - 1 - chunk))
    return _one_forward_one_backward(forward, backward, warm_up)


def _one_forward_one_backward(
    forward: Sequence[Pass], backward: Sequence[Pass], warm_up: int
) -> list[Pass]:
    """Merge forward and backward passes: `warm_up` forward passes first, then one of each in turn."""
    order = list(forward[:warm_up])
    for index, backward_pass in enumerate(backward):
        if index + warm_up < len(forward):
            order.append(forward[index + warm_up])
        order.append(backward_pass)
    return order
