"""The passes of every pipeline stage, in order: planned, priced by the simulation, run by an engine.

    F    forward              one letter and micro-batch for each pass: "F0 F1 I0 F2 W0 ..."
    B    backward, whole
    I W  backward in two: the gradient of the input, which the stage before waits for; and the weights', which
         nobody waits for and which fills what would be idle (zero bubble; Qi et al. 2024, arXiv 2401.10241)

Letters are those of torch.distributed.pipelining. A stage runs the micro-batches of each kind in ascending
order, so weights' gradients are summed in the order of the engine's own schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from holmes_ext.errors import HolmesError

#: (letter, micro-batch)
OnePass = tuple[str, int]
LETTERS = "FBIW"
_HELD = {"F": 1, "B": -1, "I": 0, "W": -1}


def before(order: Sequence[OnePass], counted: str, each: str) -> tuple[int, ...]:
    """Of each pass of the letters `each`: the passes of the letters `counted` before it."""
    counts = accumulate(letter in counted for letter, _ in order)
    return tuple(count for (letter, _), count in zip(order, counts) if letter in each)


@dataclass(frozen=True)
class Times:
    """Seconds of a micro-batch by stage; transfer: of each edge, one way. most: micro-batches whose
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
    """By stage. HolmesError where an engine could not run it."""

    stages: tuple[tuple[OnePass, ...], ...]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> PassOrder:
        """Of one text a stage, as str() and plan.json have them."""

        def step(stage: int, word: str) -> OnePass:
            if word[:1] not in LETTERS or not word[1:].isdecimal():
                raise HolmesError(f"passes of stage {stage}: {word!r} is no pass such as F0, B0, I0 or W0")
            return word[0], int(word[1:])

        return cls(tuple(tuple(step(stage, word) for word in text.split())
                         for stage, text in enumerate(texts)))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(" ".join(f"{letter}{number}" for letter, number in order) for order in self.stages)

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
                    what = {"F": "forward", "BI": "input-gradient", "BW": "weight-gradient"}[letters]
                    count = f"0 to {len(wanted) - 1}, each once and in this order"
                    raise HolmesError(f"passes of stage {stage}: its {what} passes are not those of {count}")
            at = {step: place for place, step in enumerate(order)}
            for letter, number in order:
                before = {"F": None, "B": "F", "I": "F", "W": "I"}[letter]
                if before and at[letter, number] < at[before, number]:
                    raise HolmesError(
                        f"passes of stage {stage}: {letter}{number} comes before {before}{number}")
        for _ in self.in_order():
            pass

    def in_order(self) -> Iterator[tuple[int, OnePass]]:
        """(stage, pass), each after all that it needs. HolmesError where stages wait for ever."""
        place, last = [0] * len(self.stages), len(self.stages) - 1
        done: set[tuple[int, str, int]] = set()
        while any(place[stage] < len(order) for stage, order in enumerate(self.stages)):
            before = sum(place)
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
            if sum(place) == before:
                stage = next(stage for stage, order in enumerate(self.stages) if place[stage] < len(order))
                letter, number = self.stages[stage][place[stage]]
                raise HolmesError(
                    f"passes of stage {stage}: {letter}{number} waits for ever for its neighbour")

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches whose activations each stage holds at most: from their F to their B or W."""
        return tuple(max(accumulate(_HELD[letter] for letter, _ in order)) for order in self.stages)

    def ends(self, times: Times) -> list[float]:
        """Seconds at which each stage has ended its last pass; sends take no stage's time."""
        clock, last = [0.0] * len(self.stages), len(self.stages) - 1
        ready = dict[tuple[int, str, int], float]()
        for stage, (letter, number) in self.in_order():
            begin = clock[stage]
            if letter == "F" and stage:
                begin = max(begin, ready[stage - 1, "F", number] + times.transfer[stage - 1])
            elif letter in "BI" and stage < last:
                begin = max(begin, ready[stage + 1, "I", number] + times.transfer[stage])
            clock[stage] = begin + times.of(letter, stage)
            ready[stage, "I" if letter == "B" else letter, number] = clock[stage]
        return clock
