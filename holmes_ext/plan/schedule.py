"""The passes of every pipeline stage, in order: planned, priced by the simulation, run by an engine.

    F    forward              one letter and micro-batch for each pass: "F0 F1 I0 F2 W0 ..."
    B    backward, whole
    I W  backward in two: the gradient of the input, which the stage before waits for; and the weights', which
         nobody waits for and which fills what would be idle (zero bubble; Qi et al. 2024, arXiv 2401.10241)

Letters are those of torch.distributed.pipelining. A stage runs the micro-batches of each kind in ascending
order, so weights' gradients are summed in the order of the engine's own schedule.

    g    posts the receive of a gradient. Where these are listed (NCCL), each stage link's messages
         have one order, by which both ends launch (runtime/groups/receive_order.py)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from holmes_ext.errors import HolmesError

#: (letter, micro-batch)
OnePass = tuple[str, int]
LETTERS = "FBIW"
#: (stage, "F", "I" (or B's) or "W", micro-batch) -> seconds.
Ends = dict[tuple[int, str, int], float]
_HELD = {"F": 1, "B": -1, "I": 0, "W": -1}


def before(order: Sequence[OnePass], counted: str, of_letters: str) -> tuple[int, ...]:
    """For each pass whose letter is in `of_letters`: how many before it have a letter in `counted`."""
    counts = accumulate(letter in counted for letter, _ in order)
    return tuple(count for (letter, _), count in zip(order, counts) if letter in of_letters)


@dataclass(frozen=True)
class Times:
    """Seconds of a micro-batch by stage; transfer: of each stage link, one way. most: micro-batches whose
    activations a stage's memory holds, from F to B or W."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    transfer: tuple[float, ...]
    micro_batches: int
    most: tuple[float, ...]

    def of(self, letter: str, stage: int) -> float:
        """Seconds of a pass."""
        if letter == "F":
            return self.forward[stage]
        return self.inputs[stage] * (letter in "BI") + self.weights[stage] * (letter in "BW")


@dataclass(frozen=True)
class PassOrder:
    """By stage. leads: of each stage link, by micro-batch, the activations that go before its
    gradient; () where receives hold up nothing (gloo). HolmesError where an engine could not run it."""

    stages: tuple[tuple[OnePass, ...], ...]
    leads: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> PassOrder:
        """Of one text a stage, as str() and plan.json have them."""

        def step(stage: int, word: str) -> OnePass:
            if word[:1] not in {*LETTERS, "g"} or not word[1:].isdecimal():
                raise HolmesError(
                    f"passes of stage {stage}: {word!r} is not a pass such as F0, B0, I0 or W0"
                )
            return word[0], int(word[1:])

        orders = [[step(stage, word) for word in text.split()] for stage, text in enumerate(texts)]
        leads = tuple(before(order, "F", "g") for order in orders[:-1])
        stages = (tuple(entry for entry in order if entry[0] != "g") for order in orders)
        return cls(tuple(stages), leads if any(leads) else ())

    @property
    def texts(self) -> tuple[str, ...]:
        result = []
        for stage, order in enumerate(self.stages):
            leads, words = self.leads[stage] if stage < len(self.leads) else (), list[str]()
            for letter, number in order:
                words.append(f"{letter}{number}")
                if letter == "F":
                    posted = range(bisect_left(leads, number + 1), bisect_right(leads, number + 1))
                    words += [f"g{gradient}" for gradient in posted]
            result.append(" ".join(words))
        return tuple(result)

    @property
    def micro_batches(self) -> int:
        return sum(letter == "F" for letter, _ in self.stages[0])

    @property
    def splits(self) -> bool:
        """Whether a backward is in two."""
        return any(letter == "W" for order in self.stages for letter, _ in order)

    def __post_init__(self) -> None:
        wanted = [*range(self.micro_batches)]
        for stage, order in enumerate(self.stages):
            for letters in ("F", "BI", "BW"):
                numbers = [number for letter, number in order if letter in letters]
                if numbers != wanted:
                    what = {"F": "forward", "BI": "input-gradient", "BW": "weight-gradient"}[
                        letters
                    ]
                    count = f"micro-batches 0 to {len(wanted) - 1}, each once, in order"
                    raise HolmesError(f"passes of stage {stage}: its {what} passes must be {count}")
            at = {step: place for place, step in enumerate(order)}
            for letter, number in order:
                needed = {"F": None, "B": "F", "I": "F", "W": "I"}[letter]
                if needed and at[letter, number] < at[needed, number]:
                    raise HolmesError(
                        f"passes of stage {stage}: {letter}{number} comes before {needed}{number}"
                    )
        for _ in self.in_order():
            pass
        for stage_link, leads in enumerate(self.leads):
            earliest, latest = self._sent[stage_link + 1], self._sent[stage_link]
            if not (
                len(leads) == len(latest)
                and list(leads) == sorted(leads)
                and all(low <= lead <= high for low, lead, high in zip(earliest, leads, latest))
            ):
                raise HolmesError(
                    f"passes of stage {stage_link}: a gradient's receive (g) must follow the "
                    f"forwards that the next stage needs to send it, and precede its backward"
                )

    @cached_property
    def _sent(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage, by micro-batch: forward passes before its backward."""
        return tuple(before(order, "F", "BI") for order in self.stages)

    def posted(self, stage_link: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By which the two ends post their receives, each a gradient's lead (see leads): the later stage
        those of activations, the earlier one those of gradients. Without an order of the messages as early
        as the other end may send."""
        listed = self.leads or self._sent
        return listed[stage_link], self.leads[stage_link] if self.leads else self._sent[
            stage_link + 1
        ]

    def posted_after(self, stage_link: int, kind: str, number: int) -> OnePass | None:
        """What the receiver has sent over the stage link when it posts the receive of an activation
        ("F") or a gradient ("B"); None: the step begins."""
        of_activations, of_gradients = self.posted(stage_link)
        if kind == "B":
            return "F", of_gradients[number] - 1
        gradients = bisect_right(of_activations, number)
        return ("B", gradients - 1) if gradients else None

    def in_order(self) -> Iterator[tuple[int, OnePass]]:
        """(stage, pass), each after all that it needs. HolmesError where stages wait for ever."""
        place, last = [0] * len(self.stages), len(self.stages) - 1
        done: set[tuple[int, str, int]] = set()
        while any(place[stage] < len(order) for stage, order in enumerate(self.stages)):
            progress = sum(place)
            for stage, order in enumerate(self.stages):
                while place[stage] < len(order):
                    letter, number = order[place[stage]]
                    if letter == "F" and stage and (stage - 1, "F", number) not in done:
                        break
                    if letter in "BI" and stage < last and (stage + 1, "I", number) not in done:
                        break
                    done.add((stage, "I" if letter == "B" else letter, number))
                    place[stage] += 1
                    yield stage, (letter, number)
            if sum(place) == progress:
                stage = next(
                    stage for stage, order in enumerate(self.stages) if place[stage] < len(order)
                )
                letter, number = self.stages[stage][place[stage]]
                raise HolmesError(
                    f"passes of stage {stage}: {letter}{number} deadlocks with a neighbouring stage"
                )

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches whose activations each stage holds at most: from their F to their B or W."""
        return tuple(max(accumulate(_HELD[letter] for letter, _ in order)) for order in self.stages)

    def ends(self, times: Times) -> list[float]:
        """Seconds at which each stage has ended its last pass; sends take no stage's time."""
        ready = self._ready(times)
        return [
            ready[stage, _key(order[-1][0]), order[-1][1]]
            for stage, order in enumerate(self.stages)
        ]

    def _ready(self, times: Times) -> Ends:
        """When each pass ends. Where messages have an order, one leaves once its sender knows that its
        receive is posted (rendezvous)."""
        clock, last, ready = [0.0] * len(self.stages), len(self.stages) - 1, Ends()
        for stage, (letter, number) in self.in_order():
            begin, peer = clock[stage], stage - 1 if letter == "F" else stage + 1
            if letter != "W" and 0 <= peer <= last:
                stage_link, kind = min(stage, peer), "F" if letter == "F" else "B"
                departs, seconds = ready[peer, _key(kind), number], times.transfer[stage_link]
                if self.leads and (after := self.posted_after(stage_link, kind, number)):
                    departs = max(departs, ready[stage, _key(after[0]), after[1]] + seconds)
                begin = max(begin, departs + seconds)
            clock[stage] = ready[stage, _key(letter), number] = begin + times.of(letter, stage)
        return ready

    def in_one_order(self, times: Times) -> PassOrder:
        """With one order of each stage link's messages: by the moment halfway between the end of the
        pass that
        makes each and the begin of the pass that needs it, as far as both stages' passes allow."""
        ready, begins, leads = self._ready(times), Ends(), []
        for stage, order in enumerate(self.stages):
            for letter, number in order:
                key = stage, _key(letter), number
                begins[key] = ready[key] - times.of(letter, stage)
        for stage_link, (latest, earliest) in enumerate(zip(self._sent, self._sent[1:])):
            activations, gradients = (
                [
                    ready[sender, kind, number] + begins[receiver, kind, number]
                    for number in range(self.micro_batches)
                ]
                for sender, receiver, kind in (
                    (stage_link, stage_link + 1, "F"),
                    (stage_link + 1, stage_link, "I"),
                )
            )
            leads.append(
                tuple(
                    min(max(bisect_left(activations, moment), low), high)
                    for moment, low, high in zip(gradients, earliest, latest)
                )
            )
        return replace(self, leads=tuple(leads))


def _key(letter: str) -> str:
    return "I" if letter == "B" else letter


def passes(
    stage: int,
    stages: int,
    micro_batches: int,
    virtual: int = 1,
    in_flight: int = 0,
    breadth_first: bool = False,
) -> list[Pass]:
    """Of one stage, in order. virtual: chunks; in_flight: micro-batches, if not 1F1B's stages - stage;
    breadth_first: as torch's ScheduleLoopedBFS (whose backward order differs, which changes no time)."""
    if breadth_first:
        chunks = [
            (kind, chunk) for kind in "FB" for chunk in range(virtual)[:: 1 if kind == "F" else -1]
        ]
        return [
            (kind, micro_batch, chunk)
            for kind, chunk in chunks
            for micro_batch in range(micro_batches)
        ]
    if virtual == 1:
        total, ahead = micro_batches, min((in_flight or stages - stage) - 1, micro_batches)
    elif micro_batches % stages:
        raise HolmesError(
            f"interleaved: {micro_batches} micro-batches are not divisible by {stages} pipeline stages"
        )
    else:
        total = micro_batches * virtual
        ahead = (
            min(total, (stages - stage - 1) * 2 + (virtual - 1) * stages)
            if micro_batches > stages
            else total
        )

    def unit(kind: str, index: int) -> Pass:
        if virtual == 1:
            return kind, index, 0
        chunk = index % (stages * virtual) // stages
        micro_batch = index // (stages * virtual) * stages + index % stages
        return kind, micro_batch, chunk if kind == "F" else virtual - 1 - chunk

    order = [unit("F", index) for index in range(ahead)]
    for index in range(total):
        order += [unit("F", index + ahead)] if index + ahead < total else []
        order += [unit("B", index)]
    return order


#: (kind "F" or "B", micro-batch, chunk)
Pass = tuple[str, int, int]
