"""Measures jobs whose plan adapts to measured times while they run, on emulated clusters.

    python benchmarks/adapt.py --json FILE [--cases "deepspeed 1,vote"] [--repetitions 3] [--runs FILE]

The jobs run with `--holmes` alone: without sizes, model or profile. The option --runs is explained at
harness.Runs. The cases, where ENGINE is "deepspeed" or "megatron":

    "ENGINE n"              Twelve random jobs (layers, widths, micro-batches, seconds of a stage) on 2 + 2
                            emulated nodes, with DeepSpeed's pipeline engine or megatron-core's 1F1B schedule.
                            An activation takes half of a stage's time over the slow Ethernet, and next to
                            nothing over the fast Ethernet (1 Gb/s). Layers sleep as long as an accelerator
                            would compute. The first WARM_UP_STEPS steps are not timed.
    "ENGINE issue"          The same with 6 layers of width 192, 8 micro-batches and 6 Mb/s. "stays" is a job
                            with --holmes-adapt off.
    "ENGINE n over NCCL"    The same on emulated GPUs, on whose clock matrix products and attention take as
                            long. It needs .venv-gpu/bin/python. Stages and activations take twice as long as
                            in "ENGINE n", so that the CPU work of the software stays a small part.
    "nothing to gain"       A link between stages that takes no time, with --holmes-adapt on and off in turn.
    "nothing to gain plain" The same with a data-parallel loop that uses a GradientReducer.
    "ENGINE trace"          A job while network rates change, with a plan that adapts and with fixed
                            plans (adapt_trace.py).
    "ENGINE prediction"     Steps of new configurations, predicted from one measured job
                            (adapt_prediction.py).
    "simulated n"           A pipeline with real votes and simulated steps (adapt_simulated.py).
    "simulated hour n"      The same for an hour in which the network changes (adapt_hours.py).
    "vote"                  Seconds in which 1,024 ranks agree on a new plan (adapt_vote.py).
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
from harness import Row, Runs, chosen_cases, finish, kept_rows, parser, tell, write
from holmes_lab import interleave
from holmes_lab.compare import Series, Variant, compare, max_loss_difference
from stage_links import ENGINES, two
from two_clusters import loss_row, ratio_row

from holmes_ext.cluster.spec import load_spec
from holmes_ext.samples import examples

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from carriers import LESS_MEMORY  # noqa: E402

#: Function that measures a case. It takes the name of the case, the repetitions and the runs of a file.
Rows = Callable[[str, int, Runs], list[Row]]
WARM_UP_STEPS = 8  # first steps, not timed: the plan must have adapted before
STEPS = 14
SEQUENCE = 128  # tokens
DRAWN = 12  # random jobs
HOURS = adapt_hours.PIPELINES + adapt_hours.DATA_PARALLEL
VOCABULARY = 256
FLOAT32_BYTES = 4
GIGAFLOPS = 1e9
UNLIMITED_BPS = 1e9  # rate at which a message between stages takes next to no time
#: Engine -> part of the attention's forward pass that the backward pass computes again.
RECOMPUTED_ATTENTION = {"deepspeed": 0.5, "megatron": 0.0}


@dataclass(frozen=True)
class Case:
    """Training job of two pipeline stages on an emulated accelerator."""

    layers: int
    hidden: int  # width of an activation
    micro_batches: int  # of a step
    stage_s: float  # seconds that a stage computes for a micro-batch, forward and backward

    @property
    def flops(self) -> float:
        """Return the FLOP/s with which a stage takes `stage_s` on an emulated accelerator.

        An emulated accelerator (on the CPU) charges time for the transformer layers only.
        """
        layers_of_stage = self.layers / 2
        layer_forward_s = forward_s(self.hidden, SEQUENCE, flops=GIGAFLOPS)
        # A backward pass takes twice as long as a forward pass.
        return layers_of_stage * 3 * layer_forward_s * GIGAFLOPS / self.stage_s

    def gpu_flops(self, engine: str) -> float:
        """Return the FLOP/s with which the two stages take `stage_s` on average on an emulated GPU.

        `stage_s` is the compute time of a stage for a micro-batch. An emulated GPU charges time for
        three things: the transformer layers, the output layer, and attention that the backward pass
        computes again. All of these FLOP are counted here. (The property `flops` counts the layers
        only. It is for the emulated accelerator on the CPU, which charges nothing else.)

        Args:
            engine: "deepspeed" or "megatron". DeepSpeed's backward pass computes half of the
                attention's forward pass again, megatron's nothing.
        """
        attention_flop = 4 * SEQUENCE**2 * self.hidden
        recomputed_flop = RECOMPUTED_ATTENTION[engine] * attention_flop
        layer_forward_flop = forward_s(self.hidden, SEQUENCE, flops=1)
        layers_flop = self.layers * (3 * layer_forward_flop + recomputed_flop)
        output_flop = 3 * 2 * SEQUENCE * self.hidden * VOCABULARY
        return (layers_flop + output_flop) / 2 / self.stage_s

    @property
    def half_bps(self) -> float:
        """Return the network rate (bits/s) that makes an activation take half of `stage_s`."""
        activation_bits = 8 * SEQUENCE * self.hidden * FLOAT32_BYTES
        return activation_bits / (self.stage_s / 2)

    def slower(self, times: float) -> Case:
        """Return the same job with stages that take `times` as long."""
        return replace(self, stage_s=times * self.stage_s)


def random_jobs() -> list[Case]:
    """Return the twelve random jobs. They are the same in every run."""
    draw = random.Random(32)
    return [
        Case(
            layers=draw.choice((4, 6, 8)),
            hidden=draw.choice((32, 48, 64, 96)),
            micro_batches=draw.choice((6, 8, 10, 12)),
            stage_s=draw.choice((0.08, 0.1, 0.14)),
        )
        for _ in range(DRAWN)
    ]


CASES = random_jobs()
#: Example, flag for stages, and emulated layers of a data-parallel loop with a GradientReducer.
PLAIN = ("plain_torch", "", {"classes": ["Block"]})
#: Job in which an activation takes half of a stage's time over 6 Mb/s.
ISSUE = Case(layers=6, hidden=192, micro_batches=8, stage_s=0.262144)


def _script(engine: str, case: Case) -> list[str]:
    """Return the training script of a case with its arguments.

    Args:
        engine: "deepspeed" or "megatron" for 2 pipeline stages; any other for the data-parallel loop.
    """
    example, stages, _ = ENGINES.get(engine, PLAIN)  # example folder, flag for the number of stages
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
    """Return the settings of the emulated accelerator of a case."""
    return {"flops": case.flops, **ENGINES.get(engine, PLAIN)[2]}


def _write_cluster_file(folder: Path, rate_bps: float) -> Path:
    """Write a cluster file of 2 + 2 nodes whose Ethernet has a rate in bits/s, and return its path."""
    file = folder / f"{rate_bps:.0f}.toml"
    file.write_text(two(f"{rate_bps / 1e6:.3f}Mb/s"))
    return file


def _holmes_variant(name: str, file: Path, *flags: str) -> Variant:
    """Return a job under holmes on the clusters of a file, with nodes of both clusters in turn."""
    spec = load_spec(file)
    return Variant(
        name, spec, interleave(spec), flags=("--holmes", "--holmes-cluster", str(file), *flags)
    )


def half_a_stage(
    engine: str, case: Case, name: str, repetitions: int, over_nccl: bool = False
) -> list[Row]:
    """Measure how much a slow link between two pipeline stages delays a job that adapts its plan.

    The job is compared with the same job on a network whose transfers take next to no time ("free").

    Args:
        engine: "deepspeed" or "megatron".
        case: The job. Over the slow link, an activation takes half of a stage's time.
        name: Name of the case in the results.
        repetitions: Runs of each variant.
        over_nccl: Whether the job uses emulated GPUs and NCCL.
    """
    with tempfile.TemporaryDirectory() as directory:
        slow, free = (
            _write_cluster_file(Path(directory), rate) for rate in (case.half_bps, UNLIMITED_BPS)
        )
        off = ("--holmes-adapt", "off")
        variants = [
            _holmes_variant("learns, slow", slow),
            _holmes_variant("free", free, *off),
            *([_holmes_variant("stays, slow", slow, *off)] if case == ISSUE else []),
        ]
        hardware: dict[str, Any] = {"accelerator": _accelerator(engine, case)}
        if over_nccl:
            gpus = emulated_gpus(case.gpu_flops(engine))
            hardware = {"accelerator": None, "gpus": gpus, "preload": ("torch",)}
            # LESS_MEMORY: variables that make NCCL's buffers small; all ranks share this machine.
            variants = [replace(variant, env=LESS_MEMORY) for variant in variants]
        series = compare(
            variants,
            _script(engine, case),
            repetitions=repetitions,
            steps=STEPS,
            skip=WARM_UP_STEPS,
            on_run=lambda variant, _: tell(f"{name}: {variant}"),
            **hardware,
        )
    learns, ideal, *others = series.values()
    difference = max_loss_difference(learns, ideal)
    return [
        ratio_row(
            name, "slow stage link, learns : free stage link", learns, ideal, target="<= 1.15"
        ),
        *(
            ratio_row(name, "slow stage link, stays : free stage link", stays, ideal, target="")
            for stays in others
        ),
        loss_row(name, difference),
        *steps_of(name, series),
    ]


def steps_of(name: str, by_variant: dict[str, Series]) -> list[Row]:
    """Return one row of results for each variant, with its median step time in seconds.

    Args:
        name: Name of the case in the results.
        by_variant: Name of a variant -> its measured steps.
    """
    return [
        Row.of(
            name,
            f"step {series.name}",
            series.median,
            unit="s",
            spread=series.spread,
            emulated=series.emulated,
            busy=series.busy,
        )
        for series in by_variant.values()
    ]


def nothing_to_gain(engine: str, name: str, repetitions: int, runs: Runs) -> list[Row]:
    """Measure the seconds that --holmes-adapt adds to a step if the plan is already the best.

    The network is so fast that no other plan is better. Each repetition runs the job with
    --holmes-adapt off, on, and off again ("again"). The difference of the two runs without it is
    the noise.

    Args:
        engine: "deepspeed", "megatron", or "plain" for the data-parallel loop.
        name: Name of the case in the results.
        repetitions: Number of triples of runs (off, on, off again).
        runs: Results of earlier runs.
    """
    case = Case(layers=6, hidden=32, micro_batches=6 if engine in ENGINES else 2, stage_s=0.1)

    def run_off_on_off() -> list[tuple[float, float]]:
        """Run the job with --holmes-adapt off, then on, then off again, and return its step times.

        Returns:
            Three pairs, in this order: (median seconds of a step, share of this machine's cores
            that was in use, from 0 to 1).
        """
        with tempfile.TemporaryDirectory() as directory:
            fast_network = _write_cluster_file(Path(directory), UNLIMITED_BPS)
            variants = [
                _holmes_variant(run_name, fast_network, "--holmes-adapt", flag)
                for run_name, flag in (("off", "off"), ("on", "on"), ("again", "off"))
            ]
            series = compare(
                variants,
                _script(engine, case),
                repetitions=1,
                steps=60,
                skip=WARM_UP_STEPS,
                accelerator=_accelerator(engine, case),
            )
        return [(measured.median, measured.busy) for measured in series.values()]

    triples = [runs.of(f"{name}: {number}", run_off_on_off) for number in range(1, repetitions + 1)]
    if None in triples:  # no time was left for a run
        return []
    busy = max(share for triple in triples for _, share in triple)
    offs = [off_s for (off_s, _), _, _ in triples]
    ons = [on_s for _, (on_s, _), _ in triples]
    agains = [again_s for _, _, (again_s, _) in triples]
    # "on" relative to the mean of "off" and "off again"
    costs = [2 * on / (off + again) - 1 for off, on, again in zip(offs, ons, agains)]
    noise = [again / off - 1 for off, again in zip(offs, agains)]
    return [
        Row.median(
            name,
            "what learning adds to a step",
            costs,
            unit="of a step",
            emulated=True,
            target="<= 0.005",
            busy=busy,
        ),
        Row.median(name, "A/A difference (noise)", noise, unit="of a step", emulated=True),
        *(
            Row.median(name, f"step {how}", seconds, unit="s", emulated=True, busy=busy)
            for how, seconds in (("off", [*offs, *agains]), ("on", ons))
        ),
    ]


def trace(engine: str, name: str, repetitions: int, runs: Runs) -> list[Row]:
    """Count the steps that a pipeline job makes while the rates of the network change.

    The job runs on emulated clusters. Their Ethernet gets another rate at fixed times: the list of
    times and rates is the trace. The job runs once with a plan that adapts, and once with each
    fixed plan. `repetitions` is not used: a single run is long enough.

    Args:
        engine: "deepspeed" or "megatron".
        name: Name of the case in the results.
        runs: Results of earlier runs.
    """
    case = Case(layers=6, hidden=64, micro_batches=8, stage_s=0.05)
    return adapt_trace.rows(
        name,
        script=_script(engine, case),
        accelerator=_accelerator(engine, case),
        # The unit of the trace's rates, in bits/s. At rate 1, sending an activation takes half of
        # the time that a stage computes for a micro-batch.
        half_bps=case.half_bps,
        write=_write_cluster_file,
        variant=_holmes_variant,
        runs=runs,
    )


def measure_predictions(engine: str, name: str, repetitions: int, runs: Runs) -> list[Row]:
    """Measure how well the step times of new configurations are predicted from one measured job.

    adapt_prediction.rows() runs a job, predicts its step time for another network rate, number of
    micro-batches or split of the layers, then runs these configurations and compares.

    Args:
        engine: "deepspeed" or "megatron".
        name: Name of the case in the results.
        repetitions: Not used: each configuration runs once.
        runs: Results of earlier runs.
    """
    case = Case(layers=6, hidden=64, micro_batches=8, stage_s=0.1)

    def run(variant: Variant, micro_batches: int) -> float:
        """Run the job with a number of micro-batches, and return its median step time in seconds."""
        varied = replace(case, micro_batches=micro_batches)
        (series,) = compare(
            [variant],
            _script(engine, varied),
            repetitions=1,
            steps=STEPS,
            skip=WARM_UP_STEPS,
            accelerator=_accelerator(engine, case),
        ).values()
        return series.median

    return adapt_prediction.rows(
        name,
        engine,
        half_bps=case.half_bps,  # bits/s at which an activation takes half of a stage's time
        write=_write_cluster_file,  # (folder, bits/s) -> path of a cluster file
        variant=_holmes_variant,  # (name, cluster file, *flags) -> job under holmes
        run=run,
        runs=runs,
    )


def kept_as_one_run(measure: Callable[[str, int], list[Row]]) -> Rows:
    """Return a function that measures a case, unless the results file of earlier runs has its rows.

    That file is the file of the option --runs. It stores all rows of a case as a single entry:
    either all of them are measured now, or all come from the file. There are no rows if the time
    limit of the program is over.

    Args:
        measure: Measures the case. Called with its name and the number of repetitions.
    """

    def rows(name: str, repetitions: int, runs: Runs) -> list[Row]:
        row_dicts = runs.of(name, lambda: [row.to_dict() for row in measure(name, repetitions)])
        return list(map(Row.from_dict, row_dicts or []))

    return rows


def without_repetition(measure: Callable[[str, int], list[Row]], number: int) -> Rows:
    """Return `measure` in the form of the functions of CASES_BY_NAME, for a case that is simulated.

    A simulation gives the same result each time. So the returned function ignores the number of
    repetitions and the results of earlier runs, and calls `measure` once.

    Args:
        measure: Called with the name of the case and `number`.
        number: Number of the random job, and the seed of its random numbers.

    Returns:
        A function with the arguments (name of the case, repetitions, results of earlier runs).
    """
    return kept_as_one_run(lambda name, _repetitions: measure(name, number))


#: Name of a case -> function that measures it.
CASES_BY_NAME: dict[str, Rows] = {
    **{
        f"{engine} {number}": kept_as_one_run(partial(half_a_stage, engine, case))
        for engine in ENGINES
        for number, case in enumerate(CASES, start=1)
    },
    **{
        f"{engine} {number} over NCCL": kept_as_one_run(
            partial(half_a_stage, engine, case.slower(2), over_nccl=True)
        )
        for engine in ENGINES
        for number, case in enumerate(CASES, start=1)
        if torch.version.cuda
    },
    **{
        f"{engine} issue": kept_as_one_run(partial(half_a_stage, engine, ISSUE))
        for engine in ENGINES
    },
    **{f"{engine} trace": partial(trace, engine) for engine in ENGINES},
    **{f"{engine} prediction": partial(measure_predictions, engine) for engine in ENGINES},
    "nothing to gain": partial(nothing_to_gain, "deepspeed"),
    "nothing to gain plain": partial(nothing_to_gain, "plain"),
    "vote": kept_as_one_run(adapt_vote.rows),
    **{
        f"simulated {number}": without_repetition(adapt_simulated.simulate_random_job, number)
        for number in range(1, adapt_simulated.DRAWN + 1)
    },
    **{
        f"simulated hour {number}": without_repetition(adapt_hours.rows, number)
        for number in range(1, HOURS + 1)
    },
}


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    Runs.add_arguments(arguments)
    args = arguments.parse_args()
    names = chosen_cases(args.cases, CASES_BY_NAME)
    runs = Runs(args.runs, args.minutes)
    rows: list[Row] = []
    for name in names:
        measure = CASES_BY_NAME[name]
        rows += measure(name, args.repetitions, runs)
        write([*kept_rows(args.json, names), *rows], args.json)
    return finish(
        [*kept_rows(args.json, names), *rows], args.json, "A plan that learns while the job runs"
    )


if __name__ == "__main__":
    sys.exit(main())
