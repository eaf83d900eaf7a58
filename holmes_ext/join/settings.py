"""Settings of the outer training, from the value of --holmes-outer. Needs no torch.

    every=32,fragments=4,delay=5,lr=1,momentum=auto,compress=bf16,aggregate=mean,...

The weights are divided into `fragments` parts. They are exchanged one after the other, each every `every`
inner steps (or seconds: every=60s). A fragment's pseudo-gradient is sent `delay` inner steps before the
aggregate is applied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

from holmes_ext.checks import InRange, OneOf, problems_in
from holmes_ext.errors import HolmesError
from holmes_ext.join.algorithms import ALGORITHMS, AUTO, DiLoCo, algorithm_for
from holmes_ext.join.estimate import DEFAULT, MOST_FRAGMENTS
from holmes_ext.words import counted, named_values

AGGREGATES = ("mean", "median", "trimmed", "geometric", "clipping", "flag")
COMPRESSIONS = ("off", "bf16", "int8", "2bit")
#: Upper limit of numbers without a tighter one.
_MOST = 10**12
#: Jobs of a run, at most.
_MOST_JOBS = 64
#: Settings that each job chooses for itself. All others are those of `holmes join serve --outer`.
OF_JOB = ("timeout", "part")
#: Settings that jobs do not compare with each other; the coordinator sets `min`.
_NOT_COMPARED = ("min", *OF_JOB)
#: Settings with an allowed value "auto"; it is stored as None.
_AUTO = ("momentum", "grace")


@dataclass(frozen=True)
class OuterSettings:
    """The --holmes-outer settings of a job: when and how it exchanges weights with other jobs.

    Raises:
        HolmesError: A value is out of range, or values do not fit each other.
    """

    #: Outer algorithm (algorithms.py); "auto": the job's optimizer determines it (for_optimizer).
    algorithm: Annotated[str, OneOf((AUTO, *ALGORITHMS))] = AUTO
    #: Inner steps between two exchanges of a fragment; 0: `seconds` decides.
    every: int = DEFAULT[0]
    seconds: float = 0.0
    fragments: Annotated[int, InRange(1, MOST_FRAGMENTS)] = DEFAULT[1]
    #: Inner steps from sending a pseudo-gradient to applying the aggregate.
    delay: Annotated[int, InRange(0, _MOST)] = DEFAULT[2]
    #: "keep" inner steps during the delay, or the share of local weights (0 to 1) that stays.
    mix: str = "keep"
    #: Learning rate of the outer step.
    lr: Annotated[float, InRange(1e-6, 100)] = 1.0
    #: Momentum of the outer step; None: determined by the jobs of each round (DiLoCo.momentum_of).
    momentum: Annotated[float | None, InRange(0, 0.9999)] = None
    #: Largest magnitude of an element of CO2's outer momentum; 0: no limit.
    clip: Annotated[float, InRange(0, _MOST)] = 0.0
    #: Codec of the pseudo-gradients (codecs.py).
    compress: Annotated[str, OneOf(COMPRESSIONS)] = "bf16"
    #: Aggregation of the pseudo-gradients (rounds/aggregate.py).
    aggregate: Annotated[str, OneOf(AGGREGATES)] = "mean"
    #: Values that aggregate=trimmed drops at each end.
    trim: Annotated[int, InRange(1, 31)] = 1
    #: Weight of a job's pseudo-gradient.
    weight: Annotated[str, OneOf(("tokens", "equal"))] = "tokens"
    #: A pseudo-gradient that is longer than usual by this factor is left out; 0: never.
    limit: Annotated[float, InRange(0, _MOST)] = 10.0
    #: Jobs that must contribute to a round.
    min: Annotated[int, InRange(1, _MOST_JOBS)] = 1
    #: Seconds that the others wait for a late job or a silent connection.
    timeout: Annotated[float, InRange(1, 86400)] = 60.0
    #: "k/K": this job reads the k-th (from 0) of K parts of the data set.
    part: str = "0/1"
    #: "sync": jobs wait for each other in each round; "async": a round begins without the jobs that are late.
    rounds: Annotated[str, OneOf(("sync", "async"))] = "sync"
    #: rounds=async: seconds from the quorum of jobs to the begin of the round; None: half of the time until
    #: the aggregate is needed.
    grace: Annotated[float | None, InRange(0, 86400)] = None

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise HolmesError(f"--holmes-outer: {problem}")

    def _problems(self) -> Iterator[str]:
        """Yield an error message for each invalid value, or combination of values.

        Callers should use only the first message: later checks assume that the earlier checks have
        passed, so after an invalid value their messages may be wrong.
        """
        for problem in problems_in(self):  # values outside the limits in the fields' annotations
            value = repr(problem.value) if isinstance(problem.value, str) else f"{problem.value:g}"
            yield f"{problem.field}={value} is not {problem.allowed}"
        yield from self._problems_of_period()
        algorithm = self._algorithm_class
        if not self._is_mix_valid():
            yield f"mix={self.mix!r} is neither keep nor a share from 0 to 1"
        # With rounds=async, training goes on during a round. When its aggregate is applied, the local
        # weights contain inner steps that are not part of any pseudo-gradient yet. They must stay, so
        # that the next pseudo-gradient contains them. Only mix=keep keeps them, and only algorithms
        # with keeps_progress can do that.
        keeps_inner_steps = self.mix == "keep" and algorithm.keeps_progress
        # every=60s: rank 0 converts the seconds to inner steps, and the other ranks learn the number
        # from the result of a round (RoundResult.period). With rounds=async, results do not have it.
        is_every_in_seconds = self.seconds > 0
        if self.rounds == "async" and (is_every_in_seconds or not keeps_inner_steps):
            names = [name for name, kind in ALGORITHMS.items() if kind.keeps_progress]
            yield f"rounds=async needs every=STEPS, mix=keep and algorithm={' or '.join(names)}"
        # part=k/K: this job reads the k-th of K parts of the data set.
        k, slash, parts = self.part.partition("/")
        are_numbers = slash and k.isdecimal() and parts.isdecimal()
        if not (are_numbers and int(k) < int(parts) <= _MOST_JOBS):
            yield f"part={self.part!r} is not k/K with k from 0 to K - 1, such as part=0/2"

    def _problems_of_period(self) -> Iterator[str]:
        """Yield error messages if `every`, `fragments` and `delay` do not fit each other."""
        # Exactly one of them is given: steps, or seconds.
        if (self.every > 0) == (self.seconds > 0):
            given = f"every={self.every or self.seconds:g}"
            yield f"{given} is not above 0; write steps (every=32) or seconds (every=60s)"
        if self.every % self.fragments:
            next_lower = self.every // self.fragments * self.fragments
            next_higher = next_lower + self.fragments
            yield (
                f"every={self.every} is not divisible by fragments={self.fragments}: each fragment is "
                f"exchanged once in that many steps; write every={next_lower or self.fragments} or "
                f"every={next_higher}"
            )
        algorithm = self._algorithm_class
        if self.every and algorithm.one_at_a_time and self.delay >= self.period:
            yield (
                f"delay={self.delay} must be less than every / fragments = {counted(self.period, 'step')}: a "
                "fragment's sum is applied before the next one leaves"
            )

    def _is_mix_valid(self) -> bool:
        if self.mix == "keep":
            return True
        try:
            return 0 <= float(self.mix) <= 1
        except ValueError:
            return False

    @property
    def quantizes_blocks(self) -> bool:
        """Return whether the codec rounds by blocks of elements.

        Then copies of a weight on several ranks of a job, in different blocks, are rounded differently.
        """
        return self.compress in ("int8", "2bit")

    @property
    def data_part(self) -> tuple[int, int]:
        """Return (k, K): this job reads part k (0 to K - 1) of the K parts of the data set."""
        k, _, parts = self.part.partition("/")
        return int(k), int(parts)

    @property
    def period(self) -> int:
        """Return the inner steps from one round to the next; 0 if `seconds` is set."""
        return self.every // self.fragments

    def for_optimizer(self, optimizer: Any) -> OuterSettings:
        """Return these settings with the algorithm that "auto" stands for, if that is the setting.

        Args:
            optimizer: Inner optimizer of the job, or a framework's wrapper around it.
        """
        if self.algorithm != AUTO:
            return self
        return replace(self, algorithm=algorithm_for(optimizer))

    def outer_algorithm(self) -> DiLoCo:
        """Return the outer algorithm with these settings; with "auto", that for AdamW as inner optimizer."""
        kind = self._algorithm_class
        return kind(self.lr, self.momentum, self.mix, self.delay, self.clip)

    @property
    def _algorithm_class(self) -> type[DiLoCo]:
        name = algorithm_for(None) if self.algorithm == AUTO else self.algorithm
        return ALGORITHMS[name]

    def agreed(self) -> dict[str, Any]:
        """Return the settings that must be equal in all jobs, by name."""
        values = {name: "auto" if value is None else value for name, value in asdict(self).items()}
        return {name: value for name, value in values.items() if name not in _NOT_COMPARED}


def parse_outer(text: str) -> OuterSettings:
    """Return the settings from a text such as "every=32,fragments=4"; "" gives the defaults.

    Settings that are not given get defaults that fit the given settings.

    Raises:
        HolmesError: A part of the text is malformed, or values do not fit each other.
    """
    given = _given_settings(text)
    algorithm = ALGORITHMS.get(given.get("algorithm", OuterSettings.algorithm))
    if algorithm is not None:
        given = {**algorithm.defaults, **given}
    if "every" not in given and given.get("fragments"):
        # The next multiple of `fragments`.
        period = -(-OuterSettings.every // given["fragments"])
        given["every"] = period * given["fragments"]
    every = given.get("every", OuterSettings.every)
    if isinstance(every, int) and every > 0:
        # The fragments must divide `every`, and the delay must be shorter than a period.
        default_fragments = next(count for count in (4, 3, 2, 1) if every % count == 0)
        fragments = given.setdefault("fragments", default_fragments)
        longest_delay = max(0, every // max(fragments, 1) - 1)
        given.setdefault("delay", min(OuterSettings.delay, longest_delay))
    return OuterSettings(**given)


def merge_settings(run: OuterSettings, given: str) -> OuterSettings:
    """Return the settings of a job: those of the run, with the job's own `timeout` and `part`.

    Args:
        run: Settings of the run, from `holmes join serve`.
        given: Value of the job's --holmes-outer; it may repeat settings of the run.

    Raises:
        HolmesError: A given setting contradicts the run.
    """
    values = _given_settings(given)
    for name in values:
        if name in OF_JOB or values[name] == getattr(run, name):
            continue
        setting = "every" if name == "seconds" else name
        ours = _text_of_setting(setting, values)
        theirs = _text_of_setting(setting, asdict(run))
        raise HolmesError(
            f"--holmes-outer {setting}={ours} contradicts this run: `holmes join serve` has"
            f" {setting}={theirs}; leave it out here, or start `serve` with --outer {setting}={ours}"
        )
    own = {name: value for name, value in values.items() if name in OF_JOB}
    return replace(run, **own)


def _text_of_setting(name: str, values: Mapping[str, Any]) -> str:
    """Return a setting's value in the form of --holmes-outer.

    The setting "every" is stored in two fields: `every` (inner steps) or, if that is 0, `seconds`. Example:
    every=0, seconds=60.0 give "60s".

    Args:
        name: The setting.
        values: Field of OuterSettings -> value.
    """
    value = values[name]
    if name == "every" and value == 0:
        return f"{values['seconds']:g}s"
    if value is None:
        return "auto"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _given_settings(text: str) -> dict[str, Any]:
    """Return the settings in a text: field of OuterSettings -> value, without fields that are not given.

    Raises:
        HolmesError: A part of the text is malformed.
    """
    _refuse_removed(text)
    known = [field.name for field in fields(OuterSettings) if field.name != "seconds"]
    values = named_values(text.split(","), known, "--holmes-outer")
    given: dict[str, Any] = {name: _parsed(name, value) for name, value in values.items()}
    if isinstance(given.get("every"), float):  # every=60s
        given["seconds"] = given["every"]
        given["every"] = 0
    return given


def _refuse_removed(text: str) -> None:
    """Raise HolmesError if the text contains the removed settings `compress=topk` or `topk`."""
    for part in text.split(","):
        name, _, value = map(str.strip, part.partition("="))
        if name == "topk" or (name, value) == ("compress", "topk"):
            choices = ", ".join(COMPRESSIONS)
            raise HolmesError(
                f"--holmes-outer: compress=topk was removed; compress is one of {choices}"
            )


def _parsed(name: str, value: str) -> Any:
    """Convert the text of a --holmes-outer setting to the type of the setting.

    "auto" gives None, if the setting allows it. every=32 (inner steps) gives the integer 32, and
    every=60s (seconds) the float 60.0.

    Raises:
        HolmesError: The text cannot be converted.
    """
    if name in _AUTO and value == "auto":
        return None
    kind = float if name in _AUTO else type(getattr(OuterSettings(), name))  # type of the setting
    try:
        if name == "every" and value.endswith("s"):  # in seconds
            return float(value[:-1])
        number = kind(value)
    except ValueError:
        if name == "every":
            expected = "steps or seconds (60s)"
        elif name in _AUTO:
            expected = "a number, or auto"
        else:
            expected = "a whole number" if kind is int else "a number"
        raise HolmesError(f"--holmes-outer: {name}={value!r} is not {expected}") from None
    if isinstance(number, float) and math.isnan(number):
        raise HolmesError(f"--holmes-outer: {name}={value!r} is not a number")
    return number
