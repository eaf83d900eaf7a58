"""How joined jobs update each other: what stands after --holmes-outer. Needs no torch.

    every=32,fragments=4,delay=5,lr=1,momentum=auto,compress=bf16,aggregate=mean,...

The weights are cut into `fragments`; every `every` steps (or seconds: every=60s) each of them is exchanged
once, one after the other. A fragment's pseudo-gradient leaves `delay` steps before its sum is applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from holmes_ext.checks import InRange, OneOf, problems_in
from holmes_ext.errors import HolmesError
from holmes_ext.join.algorithms import ALGORITHMS, DiLoCo
from holmes_ext.join.estimate import DEFAULT, MOST_FRAGMENTS
from holmes_ext.words import named_values

AGGREGATES = ("mean", "median", "trimmed", "geometric", "clipping", "flag")
COMPRESSIONS = ("off", "bf16", "int8", "2bit")
#: Of numbers without a limit of their own.
_MOST = 10**12
#: Each job's own business; everything else must be the same in all jobs.
OWN = ("min", "timeout", "part")
#: Numbers that may be auto: None then.
_AUTO = ("momentum", "grace")


@dataclass(frozen=True)
class OuterSettings:
    """every: steps (above 0), or 0 where `seconds` are given. delay: steps. mix: "keep", or the share of
    local weights (0 to 1) that a fragment keeps when the sum is applied. momentum: None for auto, by the
    round's jobs (algorithms.momentum_of). clip: bound on each element of CO2's outer momentum (0: none).
    limit: a pseudo-gradient so many times longer than usual is left out (0: never). trim: jobs left out at
    each end by aggregate=trimmed. min: jobs that a round needs. timeout: seconds that a late job, or a silent
    link, is waited for. part: "k/K", this job reads the k-th (from 0) of K parts of the data. rounds:
    "async": a round closes without those who are not ready, `grace` seconds (None: half of what hides it)
    after half of the jobs were. Raises HolmesError for what does not fit.
    """

    algorithm: Annotated[str, OneOf(ALGORITHMS)] = "diloco"
    every: int = DEFAULT[0]
    seconds: float = 0.0
    fragments: Annotated[int, InRange(1, MOST_FRAGMENTS)] = DEFAULT[1]
    delay: Annotated[int, InRange(0, _MOST)] = DEFAULT[2]
    mix: str = "keep"
    lr: Annotated[float, InRange(1e-6, 100)] = 1.0
    momentum: Annotated[float | None, InRange(0, 0.9999)] = None
    clip: Annotated[float, InRange(0, _MOST)] = 0.0
    compress: Annotated[str, OneOf(COMPRESSIONS)] = "bf16"
    aggregate: Annotated[str, OneOf(AGGREGATES)] = "mean"
    trim: Annotated[int, InRange(1, 31)] = 1
    weight: Annotated[str, OneOf(("tokens", "equal"))] = "tokens"
    limit: Annotated[float, InRange(0, _MOST)] = 10.0
    min: Annotated[int, InRange(1, 64)] = 1
    timeout: Annotated[float, InRange(1, 86400)] = 60.0
    part: str = "0/1"
    rounds: Annotated[str, OneOf(("sync", "async"))] = "sync"
    grace: Annotated[float | None, InRange(0, 86400)] = None

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise HolmesError(f"--holmes-outer: {problem}")

    def _problems(self) -> Iterator[str]:
        """Each is looked for where those before it are none."""
        for problem in problems_in(self):
            value = repr(problem.value) if isinstance(problem.value, str) else f"{problem.value:g}"
            yield f"{problem.field}={value} is not {problem.allowed}"
        if (self.every > 0) == (self.seconds > 0):
            given = f"every={self.every or self.seconds:g}"
            yield f"{given} is not above 0; write steps (every=32) or seconds (every=60s)"
        if self.every % self.fragments:
            down = self.every // self.fragments * self.fragments
            yield (
                f"every={self.every} is not divisible by fragments={self.fragments}: each fragment is "
                f"exchanged once in that many steps; write every={down or self.fragments} or "
                f"every={down + self.fragments}"
            )
        algorithm = ALGORITHMS[self.algorithm]
        if self.every and algorithm.one_at_a_time and self.delay >= self.period:
            yield (
                f"delay={self.delay} must be less than every / fragments = {self.period} steps: a "
                "fragment's sum is applied before the next one leaves"
            )
        if self.mix != "keep":
            try:
                fits = 0 <= float(self.mix) <= 1
            except ValueError:
                fits = False
            if not fits:
                yield f"mix={self.mix!r} is neither keep nor a share from 0 to 1"
        if self.rounds == "async" and (
            self.seconds or self.mix != "keep" or not algorithm.keeps_progress
        ):
            yield "rounds=async needs every=STEPS, mix=keep and algorithm=diloco or average"
        k, slash, parts = self.part.partition("/")
        if not (slash and k.isdecimal() and parts.isdecimal() and int(k) < int(parts) <= 64):
            yield f"part={self.part!r} is not k/K with k from 0 to K - 1, such as part=0/2"

    @property
    def rounds_by_blocks(self) -> bool:
        """Whether copies of a weight, on several ranks of a job, would be rounded differently."""
        return self.compress in ("int8", "2bit")

    @property
    def data_part(self) -> tuple[int, int]:
        """(k, K)."""
        k, _, parts = self.part.partition("/")
        return int(k), int(parts)

    @property
    def period(self) -> int:
        """Steps from one round (exchange of one fragment) to the next; 0 where `seconds` decide."""
        return self.every // self.fragments

    def outer_algorithm(self) -> DiLoCo:
        """The algorithm with these settings."""
        return ALGORITHMS[self.algorithm](self.lr, self.momentum, self.mix, self.delay, self.clip)

    def agreed(self) -> dict[str, Any]:
        """What all jobs must have been given alike."""
        given = {name: "auto" if value is None else value for name, value in asdict(self).items()}
        return {name: value for name, value in given.items() if name not in OWN}


def parse_outer(text: str) -> OuterSettings:
    """Settings from "every=32,fragments=4,..."; "" gives the defaults. HolmesError names the part that does
    not fit."""
    _refuse_removed(text)
    known = [field.name for field in fields(OuterSettings) if field.name != "seconds"]
    values = named_values(text.split(","), known, "--holmes-outer")
    given: dict[str, Any] = {name: _read(name, value) for name, value in values.items()}
    if isinstance(given.get("every"), float):
        given |= {"seconds": given["every"], "every": 0}
    if (algorithm := ALGORITHMS.get(given.get("algorithm", OuterSettings.algorithm))) is not None:
        given = {**algorithm.defaults, **given}
    if given.get("every", OuterSettings.every) and "fragments" in given and "every" not in given:
        period = -(-OuterSettings.every // given["fragments"])
        given["every"] = period * given["fragments"]
    every = given.get("every", OuterSettings.every)
    if isinstance(every, int) and every > 0:  # what was not given suits what was
        given.setdefault("fragments", next(count for count in (4, 3, 2, 1) if every % count == 0))
        given.setdefault(
            "delay", min(OuterSettings.delay, max(0, every // max(given["fragments"], 1) - 1))
        )
    return OuterSettings(**given)


def _refuse_removed(text: str) -> None:
    """Raise HolmesError if the text contains `compress=topk` or its setting `topk`, which were removed."""
    for part in text.split(","):
        name, _, value = map(str.strip, part.partition("="))
        if name == "topk" or (name, value) == ("compress", "topk"):
            choices = ", ".join(COMPRESSIONS)
            raise HolmesError(
                f"--holmes-outer: compress=topk was removed; compress is one of {choices}"
            )


def _read(name: str, value: str) -> Any:
    if name in _AUTO and value == "auto":
        return None
    kind = float if name in _AUTO else type(getattr(OuterSettings(), name))
    try:
        if name == "every" and value.endswith("s"):
            return float(value[:-1])
        number = kind(value)
    except ValueError:
        others = {"every": "steps or seconds (60s)", **dict.fromkeys(_AUTO, "a number, or auto")}
        wanted = others.get(name, "a whole number" if kind is int else "a number")
        raise HolmesError(f"--holmes-outer: {name}={value!r} is not {wanted}") from None
    if isinstance(number, float) and number != number:
        raise HolmesError(f"--holmes-outer: {name}={value!r} is not a number")
    return number
