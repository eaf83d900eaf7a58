"""A plan that learns while the job runs: `--holmes` alone, without sizes, model or profile, in emulated
clusters.

    python benchmarks/adapt.py --json FILE [--cases "deepspeed 1,vote"] [--repetitions 3] [--runs FILE]

"ENGINE issue": 6 layers of 192, 8 micro-batches, 6 Mb/s. --runs: see harness.Runs.

"ENGINE n": twelve drawn cases (layers, widths, micro-batches, seconds of a stage) on 2 + 2 emulated nodes,
for DeepSpeed's pipeline engine and megatron-core's 1F1B. An activation takes half a stage's time over
Ethernet, or next to nothing (1 Gb/s); layers sleep as long as an accelerator would compute. Steps FIRST to
the last are timed. "stays" (the issue's case): --holmes-adapt off.

"ENGINE n over NCCL", of .venv-gpu/bin/python alone: the same on emulated GPUs, by whose clock matrix products
and attention take as long. Stages, and so activations, take twice as long as drawn: the host has time left.

"ENGINE trace", "ENGINE prediction", "simulated n", "simulated hour n", "vote": see adapt_trace.py,
adapt_prediction.py, adapt_simulated.py, adapt_hours.py, adapt_vote.py.

"nothing to gain": a stage link that takes no time, --holmes-adapt on and off, alternating; "...
plain": the same of a data-parallel loop with a GradientReducer.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import adapt_hours
import adapt_prediction
import adapt_simulated
import adapt_trace
import adapt_vote
import torch
from emulated import emulated_gpus, forward_s
from harness import Row, Runs, chosen, finish, kept, parser, tell, write
from holmes_lab import interleave
from holmes_lab.compare import Series, Variant, compare, max_loss_difference
from stage_links import ENGINES, two
from two_clusters import ratio_row

from holmes_ext.cluster.spec import load_spec
from holmes_ext.samples import examples

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from carriers import LESS_MEMORY  # noqa: E402

#: (case, repetitions, runs that a file has) -> its rows.
Rows = Callable[[str, int, Runs], list[Row]]
#: Steps by which a plan must have learned; that are timed.
FIRST, STEPS = 8, 14
SEQUENCE, DRAWN, HOURS = 128, 12, adapt_hours.PIPELINES + adapt_hours.SUMS
VOCABULARY = 256
#: Of an attention's forward pass, what the backward pass computes again.
AGAIN = {"deepspeed": 0.5, "megatron": 0.0}


@dataclass(frozen=True)
class Case:
    """stage_s: seconds that a stage computes for a micro-batch, forward and backward."""

    layers: int
    hidden: int
    micro_batches: int
    stage_s: float

    @property
    def flops(self) -> float:
        """Of an accelerator on which a stage takes so long."""
        return self.layers / 2 * 3 * forward_s(self.hidden, SEQUENCE, 1e9) * 1e9 / self.stage_s

    def gpu_flops(self, engine: str) -> float:
        """Of an emulated GPU on which a stage takes so long, the mean of both: its clock counts the output
        layer, too, and what fused attention computes again in its backward pass."""
        attention = 4 * SEQUENCE**2 * self.hidden
        blocks = self.layers * (3 * forward_s(self.hidden, SEQUENCE, 1) + AGAIN[engine] * attention)
        return (blocks + 3 * 2 * SEQUENCE * self.hidden * VOCABULARY) / 2 / self.stage_s

    @property
    def half_bps(self) -> float:
        """At which an activation takes half of that."""
        return 8 * SEQUENCE * self.hidden * 4 / (self.stage_s / 2)

    def slower(self, times: float) -> Case:
        return replace(self, stage_s=times * self.stage_s)


def drawn() -> list[Case]:
    draw = random.Random(32)
    return [
        Case(
            draw.choice((4, 6, 8)),
            draw.choice((32, 48, 64, 96)),
            draw.choice((6, 8, 10, 12)),
            draw.choice((0.08, 0.1, 0.14)),
        )
        for _ in range(DRAWN)
    ]


CASES = drawn()
#: A data-parallel loop with a GradientReducer, without stages.
PLAIN = ("plain_torch", "", {"classes": ["Block"]})
#: An activation takes half a stage's time over 6 Mb/s.
ISSUE = Case(6, 192, 8, 0.262144)


def _script(engine: str, case: Case) -> list[str]:
    example, stages, _ = ENGINES.get(engine, PLAIN)
    model = (
        f"--layers {case.layers} --hidden {case.hidden} --heads 4 "
        f"--sequence {SEQUENCE} --micro-batch 1"
    ).split()
    return [
        str(examples() / example / "train.py"),
        *model,
        *([stages, "2"] if stages else []),
        "--micro-batches",
        str(case.micro_batches),
    ]


def _accelerator(engine: str, case: Case) -> dict[str, Any]:
    return {"flops": case.flops, **ENGINES.get(engine, PLAIN)[2]}


def _file(folder: Path, rate_bps: float) -> Path:
    file = folder / f"{rate_bps:.0f}.toml"
    file.write_text(two(f"{rate_bps / 1e6:.3f}Mb/s"))
    return file


def _variant(name: str, file: Path, *flags: str) -> Variant:
    spec = load_spec(file)
    return Variant(
        name, spec, interleave(spec), ("--holmes", "--holmes-cluster", str(file), *flags)
    )


def half_a_stage(
    engine: str, case: Case, name: str, repetitions: int, over_nccl: bool = False
) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        slow, free = (_file(Path(directory), rate) for rate in (case.half_bps, 1e9))
        off = ("--holmes-adapt", "off")
        variants = [
            _variant("learns, slow", slow),
            _variant("free", free, *off),
            *([_variant("stays, slow", slow, *off)] if case == ISSUE else []),
        ]
        hardware: dict[str, Any] = {"accelerator": _accelerator(engine, case)}
        if over_nccl:
            gpus = emulated_gpus(case.gpu_flops(engine))
            hardware = {"accelerator": None, "gpus": gpus, "preload": ("torch",)}
            variants = [replace(variant, env=LESS_MEMORY) for variant in variants]
        series = compare(
            variants,
            _script(engine, case),
            repetitions=repetitions,
            steps=STEPS,
            skip=FIRST,
            on_run=lambda variant, _: tell(f"{name}: {variant}"),
            **hardware,
        )
    learns, ideal, *others = series.values()
    difference = max_loss_difference(learns, ideal)
    return [
        ratio_row(name, "slow stage link, learns : free stage link", learns, ideal, "<= 1.15"),
        *(
            ratio_row(name, "slow stage link, stays : free stage link", stays, ideal, "")
            for stays in others
        ),
        Row.median(name, "largest loss difference", [difference], "nats", False, "<= 1e-6"),
        *steps_of(name, series),
    ]


def steps_of(name: str, by_variant: dict[str, Series]) -> list[Row]:
    return [
        Row.of(
            name,
            f"step {series.name}",
            series.median,
            "s",
            series.spread,
            series.emulated,
            busy=series.busy,
        )
        for series in by_variant.values()
    ]


def nothing_to_gain(engine: str, name: str, repetitions: int, runs: Runs) -> list[Row]:
    case = Case(6, 32, 6 if engine in ENGINES else 2, 0.1)

    def three() -> list[tuple[float, float]]:
        """(seconds of a step, share of the cores in use) of off, on, and off again."""
        with tempfile.TemporaryDirectory() as directory:
            free = _file(Path(directory), 1e9)
            variants = [
                _variant(how, free, "--holmes-adapt", flag)
                for how, flag in (("off", "off"), ("on", "on"), ("again", "off"))
            ]
            series = compare(
                variants,
                _script(engine, case),
                repetitions=1,
                steps=60,
                skip=FIRST,
                accelerator=_accelerator(engine, case),
            )
        return [(measured.median, measured.busy) for measured in series.values()]

    triples = [runs.of(f"{name}: {number}", three) for number in range(1, repetitions + 1)]
    if None in triples:
        return []
    busy = max(share for triple in triples for _, share in triple)
    offs, ons, agains = ([triple[index][0] for triple in triples] for index in range(3))
    costs = [2 * on / (off + again) - 1 for off, on, again in zip(offs, ons, agains)]
    noise = [again / off - 1 for off, again in zip(offs, agains)]
    return [
        Row.median(
            name, "what learning adds to a step", costs, "of a step", True, "<= 0.005", busy
        ),
        Row.median(name, "A/A difference (noise)", noise, "of a step", True),
        *(
            Row.median(name, f"step {how}", seconds, "s", True, busy=busy)
            for how, seconds in (("off", [*offs, *agains]), ("on", ons))
        ),
    ]


# --------------------------------------------------------------------------- rates that change


def trace(engine: str, name: str, repetitions: int, runs: Runs) -> list[Row]:
    case = Case(6, 64, 8, 0.05)
    return adapt_trace.rows(
        name,
        _script(engine, case),
        _accelerator(engine, case),
        case.half_bps,
        _file,
        _variant,
        runs,
    )


def predicted(engine: str, name: str, repetitions: int, runs: Runs) -> list[Row]:
    case = Case(6, 64, 8, 0.1)

    def run(variant: Variant, micro_batches: int) -> float:
        varied = replace(case, micro_batches=micro_batches)
        (series,) = compare(
            [variant],
            _script(engine, varied),
            repetitions=1,
            steps=STEPS,
            skip=FIRST,
            accelerator=_accelerator(engine, case),
        ).values()
        return series.median

    return adapt_prediction.rows(name, engine, case.half_bps, _file, _variant, run, runs)


def whole(measure: Callable[[str, int], list[Row]]) -> Rows:
    """The rows of measure(name, repetitions), kept together."""

    def rows(name: str, repetitions: int, runs: Runs) -> list[Row]:
        row_dicts = runs.of(name, lambda: [row.to_dict() for row in measure(name, repetitions)])
        return list(map(Row.from_dict, row_dicts or []))

    return rows


def once(measure: Callable[[str, int], list[Row]], number: int) -> Rows:
    """The rows of measure(name, number), which needs no repetition."""
    return whole(lambda name, _: measure(name, number))


MADE: dict[str, Rows] = {
    **{
        f"{engine} {number}": whole(partial(half_a_stage, engine, case))
        for engine in ENGINES
        for number, case in enumerate(CASES, start=1)
    },
    **{
        f"{engine} {number} over NCCL": whole(
            partial(half_a_stage, engine, case.slower(2), over_nccl=True)
        )
        for engine in ENGINES
        for number, case in enumerate(CASES, start=1)
        if torch.version.cuda
    },
    **{f"{engine} issue": whole(partial(half_a_stage, engine, ISSUE)) for engine in ENGINES},
    **{f"{engine} trace": partial(trace, engine) for engine in ENGINES},
    **{f"{engine} prediction": partial(predicted, engine) for engine in ENGINES},
    "nothing to gain": partial(nothing_to_gain, "deepspeed"),
    "nothing to gain plain": partial(nothing_to_gain, "plain"),
    "vote": whole(adapt_vote.rows),
    **{
        f"simulated {number}": once(adapt_simulated.drawn, number)
        for number in range(1, adapt_simulated.DRAWN + 1)
    },
    **{
        f"simulated hour {number}": once(adapt_hours.rows, number) for number in range(1, HOURS + 1)
    },
}


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    Runs.add_arguments(arguments)
    args = arguments.parse_args()
    names, runs, rows = chosen(args.cases, MADE), Runs(args.runs, args.minutes), []
    for name in names:
        rows += MADE[name](name, args.repetitions, runs)
        write([*kept(args.json, names), *rows], args.json)
    return finish(
        [*kept(args.json, names), *rows], args.json, "A plan that learns while the job runs"
    )


if __name__ == "__main__":
    sys.exit(main())
