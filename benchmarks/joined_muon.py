"""Compares outer steps of joined jobs with a synchronous job, for AdamW and for Muon as inner optimizer.

    python benchmarks/joined_muon.py --json FILE [--runs FILE] [--minutes M] [--jobs 2,4,8] [--seeds 3]
        [--cases adamw,muon] [--ways NAME;...] [--steps 128]
        [--size "0.12 M"] [--init gpt2] [--lr X]

The jobs are simulated: K copies of a byte-level GPT train in turns in one process. Outer steps,
codecs and aggregates are those of holmes (joined_losses.OuterLoop). Each step reads 16 sequences of 64 bytes
of real text, divided among the jobs, so all ways to train read the same tokens in the same order:

    synchronous         one job that reads all sequences of each step: all data-parallel ranks of all jobs
                        together
    diloco, muon        K joined jobs that read a K-th of the sequences each; --holmes-outer
                        algorithm=diloco or muon, all else with its default
    muon of blocks      the same as muon, but the tables of bytes and positions step as in diloco. (A large
                        vocabulary's table does so by itself.)

The inner optimizer takes the training steps of a job. It is the case of --cases:

    adamw               torch.optim.AdamW for all parameters
    muon                torch.optim.Muon, the reference implementation (Jordan et al. 2024), for the weight
                        matrices of the blocks, and AdamW for the rest. Both have the same learning rate;
                        Muon's steps are scaled to the length of AdamW's (arXiv 2502.16982)

Joined jobs with inner Muon and outer diloco are MuLoCo (arXiv 2505.23725).

Each inner optimizer and way has the learning rate that was best in a sweep of 128 steps with seed 0
(joined jobs: two of them). The evaluation loss is that of the jobs' mean weights, on text that no job has
read. Rows have the mean over the seeds, and the smallest and largest value; differences are those of runs
with the same seed.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import harness
import torch
from harness import Row, Runs, finish, kept_rows, parser, write
from joined_losses import CLIP, GPT, SEQUENCE, OuterLoop, batch, evaluate, flatten, read_texts
from torch.nn import functional

from holmes_ext.join.settings import parse_outer

#: Parameters of the model -> layers, hidden size, heads.
SIZES = {"0.12 M": (2, 64, 2), "0.8 M": (4, 128, 4), "2.7 M": (6, 192, 6)}
ROWS = 16  # sequences of a step, of all jobs together
STEPS = 128
SWEEP_STEPS = 128
WARM_UP = 32  # steps
INNER = ("adamw", "muon")
#: First learning rates of a sweep. It goes on by factors of two until a rate is worse than the last.
FIRST_RATES = (4e-3, 8e-3)
SWEEP_JOBS = 2
SYNCHRONOUS, BLOCKS = "synchronous", "muon of blocks"
#: Way to join -> value of --holmes-outer.
OUTER = {
    "diloco": "algorithm=diloco",
    "muon": "algorithm=muon",
    BLOCKS: "algorithm=muon",
}
#: Ways whose evaluation losses are compared.
COMPARED = (
    ("diloco", SYNCHRONOUS),
    ("muon", SYNCHRONOUS),
    ("muon", "diloco"),
    (BLOCKS, "diloco"),
)
GRADIENT_BYTES = 2  # of an element that a synchronous job sends: bfloat16
MEGABYTE = 1e6


class Run(NamedTuple):
    """One training run: its model, its optimizers, its number of joined jobs and its random seed."""

    size: str  # of the model: a key of SIZES
    inner: str  # inner optimizer, for the steps of a job: a name of INNER
    way: str  # SYNCHRONOUS, or how the jobs exchange weights: a key of OUTER
    jobs: int  # joined jobs (separate trainings that exchange weights); 1 if synchronous
    steps: int
    init: str  # of the weights: "gpt2", or "example" for that of examples/plain_torch
    lr: float  # largest learning rate of the inner optimizer
    seed: int

    @property
    def key(self) -> str:
        """Return the run's name in the file of --runs."""
        return (
            f"{self.size}, {self.inner}, {self.way}, jobs {self.jobs}, steps {self.steps}, "
            f"{self.init}, lr {self.lr:g}, seed {self.seed}"
        )


class Result(NamedTuple):
    """Losses of one training run, in nats for each byte of text, and the bytes that a job has sent."""

    evaluation: float  # of the mean weights of all jobs, on text that no job has read
    evaluation_of_one_job: float  # of the first job's weights, on the same text
    training: float  # mean over the jobs and the last 32 steps
    sent_bytes: int  # by one job
    cpu_s: float  # CPU time of the run, in seconds


def initialize_as_gpt2(model: torch.nn.Module) -> None:
    """Draw all weights anew as GPT-2 does: normal with standard deviation 0.02; biases are 0.

    The model's own initialization (examples/plain_torch) has a standard deviation of 1 for the
    embedding of positions, but of 0.02 for that of bytes. Their sum, the input of the first block,
    hardly depends on the byte. So the first 100 steps learn little more than the frequency of bytes.
    """
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            torch.nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.zeros_(module.bias)


class Trainer:
    """Training of one job: its model, its inner optimizer and its learning-rate schedule.

    The weights of the model are views of a flat tensor. Outer steps change it.
    """

    def __init__(self, run: Run):
        """Make a model with random weights, its inner optimizer and its learning-rate schedule.

        A cosine lowers the learning rate to a tenth over the run's steps.
        """
        torch.manual_seed(run.seed)
        self.model = GPT(*SIZES[run.size], SEQUENCE)
        if run.init == "gpt2":
            initialize_as_gpt2(self.model)
        self.flat = flatten(self.model)
        matrices = []
        if run.inner == "muon":
            matrices = [p for p in self.model.blocks.parameters() if p.dim() == 2]
        in_matrices = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in in_matrices]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=run.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        ]
        if matrices:
            self.optimizers.append(
                torch.optim.Muon(
                    matrices, lr=run.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
                )
            )

        def share_of_lr(step: int) -> float:
            """Return the learning rate of a step as a share of the largest: warm-up, then a cosine."""
            cosine = 0.55 + 0.45 * math.cos(math.pi * min(step, run.steps) / run.steps)
            return min(1, (step + 1) / WARM_UP) * cosine

        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)
            for optimizer in self.optimizers
        ]

    def step(self, tokens: torch.Tensor) -> float:
        """Train one step, and return the loss before it."""
        loss = functional.cross_entropy(
            self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer, schedule in zip(self.optimizers, self.schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss.item()


@cache
def parameter_count(size: str) -> int:
    """Return the number of parameters of a model: a key of SIZES."""
    return sum(p.numel() for p in GPT(*SIZES[size], SEQUENCE).parameters())


def outer_loop(way: str, trainers: list[Trainer]) -> OuterLoop:
    """Return the OuterLoop (joined_losses.py) that combines the weights of joined jobs now and then.

    Args:
        way: How the jobs exchange weights: a key of OUTER.
        trainers: The jobs.
    """
    loop = OuterLoop(parse_outer(OUTER[way]), trainers)
    if way == BLOCKS:
        # "muon of blocks": the outer Muon orthogonalizes the matrices in `loop.matrices`, and steps
        # all other weights as diloco does. Here the tables of bytes and positions (embeddings) are
        # removed from them. These are the first two tensors of the flat weights.
        model = trainers[0].model
        tables = model.embedding.weight.numel() + model.positions.weight.numel()
        for index, matrices in enumerate(loop.matrices):
            # Index of the first element of this fragment in the flat weights.
            first = loop.ranges[index].start
            places = [matrix for matrix in matrices.places if first + matrix.start >= tables]
            loop.matrices[index] = replace(matrices, places=places)
    return loop


def train(run: Run, training: torch.Tensor, held_out: torch.Tensor) -> Result:
    """Train the jobs of a run, and return their losses at the end.

    Args:
        run: The model, the optimizers, and the number of joined jobs.
        training: The text for training, as bytes.
        held_out: The text for evaluation, as bytes.
    """
    begin_s = time.process_time()
    trainers = [Trainer(run) for _ in range(run.jobs)]
    joined = None if run.way == SYNCHRONOUS else outer_loop(run.way, trainers)
    losses = []
    for step in range(run.steps):
        shares = batch(training, run.seed, step, ROWS).split(ROWS // run.jobs)  # of each job
        losses.append(
            statistics.fmean(trainer.step(share) for trainer, share in zip(trainers, shares))
        )
        if joined:
            joined.after_step()
    first = trainers[0]
    evaluation_of_one_job = evaluate(first.model, held_out)
    # The first job's model gets the mean weights. Its own were evaluated above.
    first.flat.copy_(torch.stack([trainer.flat for trainer in trainers]).mean(0))
    return Result(
        evaluation=evaluate(first.model, held_out),
        evaluation_of_one_job=evaluation_of_one_job,
        training=statistics.fmean(losses[-32:]),
        sent_bytes=joined.sent_bytes if joined else 0,
        cpu_s=time.process_time() - begin_s,
    )


class Experiment:
    """Runs with one model and one number of steps. The results file is written after each run.

    Args:
        size: Size of the model: a key of SIZES.
        init: Initialization of the weights: "gpt2" or "example".
        steps: Training steps of the runs that are compared. Those of the sweep have SWEEP_STEPS.
        runs: Results of earlier runs, and the time limit.
        path: The results file; None writes none. Rows of other cases in it are kept.
    """

    def __init__(self, size: str, init: str, steps: int, runs: Runs, path: Path | None):
        self._size = size
        self._init = init
        self._steps = steps
        self._runs = runs
        self._path = path
        self._earlier_rows = kept_rows(path)
        self._texts = read_texts()
        self._results: dict[Run, Result] = {}
        #: Learning rates of the compared runs: (inner optimizer, way) -> rate.
        self.rates: dict[tuple[str, str], float] = {}

    def sweep(self, inner: str, way: str) -> None:
        """Find the best learning rate of an inner optimizer and a way to train, with seed 0.

        If no time is left for all rates of the sweep, no rate is stored.

        Args:
            inner: Inner optimizer: a name of INNER.
            way: SYNCHRONOUS, or how joined jobs exchange weights: a key of OUTER.
        """
        if way == BLOCKS:
            # The way BLOCKS differs from the way "muon" only in the tables (embeddings) of bytes and
            # positions, so it gets the learning rate of that way.
            self.sweep(inner, "muon")
            if (inner, "muon") in self.rates:
                self.rates[inner, way] = self.rates[inner, "muon"]
            return
        losses: dict[float, float] = {}  # learning rate -> evaluation loss
        rates = list(FIRST_RATES)
        while rates:
            rate = rates.pop(0)
            result = self._result(self._run(inner, way, SWEEP_JOBS, SWEEP_STEPS, rate, seed=0))
            if result is None:
                return
            losses[rate] = result.evaluation
            best = min(losses, key=losses.__getitem__)
            if rates:
                continue
            largest_rate, smallest_rate = max(losses), min(losses)  # the keys are rates
            # A still better rate may lie outside of the range that was tried.
            if best == largest_rate:
                rates = [2 * best]
            elif best == smallest_rate:
                rates = [best / 2]
        self.rates[inner, way] = best

    def measure(self, inner: str, way: str, jobs: int, seed: int) -> None:
        """Train once with the learning rate that the sweep found, and store the result.

        Nothing happens if the sweep found no rate, or no time is left.

        Args:
            inner: Inner optimizer: a name of INNER.
            way: SYNCHRONOUS, or how joined jobs exchange weights: a key of OUTER.
            jobs: Number of joined jobs.
            seed: Seed of the weights and of the order of the text.
        """
        rate = self.rates.get((inner, way))
        if rate is not None:
            self._result(self._run(inner, way, jobs, self._steps, rate, seed))

    def rows(self) -> list[Row]:
        """Return the rows of the results file.

        First come rows of an earlier file that have not been measured again. Then come the rows of the
        sweeps: the runs of SWEEP_STEPS steps with seed 0, of a single job or SWEEP_JOBS jobs. The comparisons
        of the ways to train are last, by inner optimizer and number of jobs.
        """
        rows = []
        for run, result in self._results.items():
            if run.steps == SWEEP_STEPS and run.jobs in (1, SWEEP_JOBS) and run.seed == 0:
                case = f"{self._case_prefix}, {SWEEP_STEPS} steps, inner {run.inner}, sweep"
                metric = f"evaluation loss, {run.way}, lr {run.lr:g}"
                rows.append(_row(case, metric, [result.evaluation]))
        compared_runs = [  # each with the best learning rate of its optimizer and way
            run
            for run in self._results
            if run.steps == self._steps and run.lr == self.rates.get((run.inner, run.way))
        ]
        inners = dict.fromkeys(run.inner for run in compared_runs)
        jobs_list = sorted({run.jobs for run in compared_runs} - {1})
        for inner, jobs in product(inners, jobs_list):
            by_way: dict[str, dict[int, Result]] = {}  # way -> seed -> result
            for run in compared_runs:
                if run.inner == inner and run.jobs in (1, jobs):
                    by_way.setdefault(run.way, {})[run.seed] = self._results[run]
            case = f"{self._case_prefix}, {self._steps} steps, inner {inner}, {jobs} jobs"
            gradient_bytes = GRADIENT_BYTES * parameter_count(self._size) * self._steps
            rows += _rows_of_comparison(case, jobs, gradient_bytes, by_way)
        measured = {(row.case, row.metric) for row in rows}
        earlier = [row for row in self._earlier_rows if (row.case, row.metric) not in measured]
        return earlier + rows

    @property
    def _case_prefix(self) -> str:
        """Return how the name of each row's case begins: the size of the model, such as "0.12 M".

        The initialization of the weights follows if it is not the default, "gpt2".
        """
        return self._size if self._init == "gpt2" else f"{self._size}, init {self._init}"

    def _run(self, inner: str, way: str, jobs: int, steps: int, lr: float, seed: int) -> Run:
        """Return a run with the model of this experiment.

        Args:
            inner: Inner optimizer: a name of INNER.
            way: SYNCHRONOUS, or how joined jobs exchange weights: a key of OUTER.
            jobs: Number of joined jobs. A synchronous run has 1 instead, for all together.
            steps: Training steps.
            lr: Largest learning rate of the inner optimizer.
            seed: Seed of the weights and of the order of the text.
        """
        jobs_of_way = 1 if way == SYNCHRONOUS else jobs
        return Run(self._size, inner, way, jobs_of_way, steps, self._init, lr, seed)

    def _result(self, run: Run) -> Result | None:
        """Return the stored result of a run; train it if there is none; None if no time is left."""
        if run not in self._results:
            kept = self._runs.of(run.key, lambda: train(run, *self._texts))
            if kept is None:
                return None
            self._results[run] = Result(*kept)
            write(self.rows(), self._path)
        return self._results[run]


def _row(case: str, metric: str, values: list[float], unit: str = "nats") -> Row:
    """Return a row with the mean of the values of several seeds, and with their range.

    Args:
        case: Name of the case.
        metric: Name of the metric.
        values: Value of each seed.
        unit: Unit of the values.
    """
    spread = min(values), max(values)
    return Row.of(case, metric, statistics.fmean(values), unit=unit, spread=spread, emulated=False)


def _rows_of_comparison(
    case: str, jobs: int, gradient_bytes: int, results: dict[str, dict[int, Result]]
) -> list[Row]:
    """Return the rows that compare the ways to train, for one inner optimizer and number of jobs.

    Args:
        case: Name of the case: the model, the steps, the inner optimizer and the number of jobs.
        jobs: Number of joined jobs.
        gradient_bytes: Bytes of the gradients of all steps.
        results: Way to train -> seed -> result.
    """
    rows = []
    for way, by_seed in results.items():
        of_way = list(by_seed.values())
        rows.append(_row(case, f"seeds, {way}", [len(of_way)], unit=""))
        rows.append(_row(case, f"evaluation loss, {way}", [one.evaluation for one in of_way]))
        rows.append(
            _row(
                case,
                f"evaluation loss of one job's weights, {way}",
                [one.evaluation_of_one_job for one in of_way],
            )
        )
        rows.append(_row(case, f"training loss, {way}", [one.training for one in of_way]))
        sent = [one.sent_bytes for one in of_way]
        if way == SYNCHRONOUS:
            # A ring all-reduce over the clusters of the jobs, of the gradients of every step.
            sent = [round(2 * (jobs - 1) / jobs * gradient_bytes)]
        rows.append(
            _row(case, f"sent by a job, {way}", [one / MEGABYTE for one in sent], unit="MB")
        )
    for way, baseline in COMPARED:
        both = sorted(results.get(way, {}).keys() & results.get(baseline, {}).keys())
        if both:
            differences = [
                results[way][seed].evaluation - results[baseline][seed].evaluation for seed in both
            ]
            rows.append(_row(case, f"{way} - {baseline}", differences))
    return rows


def cells(jobs_list: list[int], seeds: Iterable[int]) -> list[tuple[int, int]]:
    """Return pairs of a number of jobs and a seed, in the order of measuring.

    The first two numbers of jobs are measured first, with all seeds, and then the others. For example,
    the order for 2, 4 and 8 jobs with the seeds 0 and 1 is:

        (2, 0) (4, 0) (2, 1) (4, 1)    (8, 0) (8, 1)
    """
    seeds = list(seeds)
    order: list[tuple[int, int]] = []
    for numbers_of_jobs in (jobs_list[:2], jobs_list[2:]):
        for seed in seeds:
            order += [(jobs, seed) for jobs in numbers_of_jobs]
    return order


def main() -> int:
    """Train with the chosen inner optimizers and numbers of jobs; print and write the losses.

    The inner optimizers (--cases, INNER) take the training steps of a job. The ways to train (--ways)
    are "synchronous" (a single job), and the keys of OUTER: how joined jobs exchange weights.

    Returns:
        The exit status: 2 if a number of jobs or a way is unknown, else 0.
    """
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--size", choices=SIZES, default="0.12 M", help="of the model")
    arguments.add_argument("--init", choices=("gpt2", "example"), default="gpt2")
    arguments.add_argument("--lr", type=float, help="this learning rate, without a sweep")
    arguments.add_argument("--first-seed", type=int, default=0)
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument(
        "--jobs", default="2,4,8", metavar="K,...", help="numbers of joined jobs"
    )
    arguments.add_argument(
        "--ways", default="synchronous;diloco;muon", metavar="NAME;...", help="only these"
    )
    Runs.add_arguments(arguments)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    jobs_list = [int(number) for number in args.jobs.split(",")]
    ways = args.ways.split(";")
    if set(jobs_list) - {2, 4, 8} or set(ways) - {SYNCHRONOUS, *OUTER}:
        harness.tell(
            f"joined_muon.py: --jobs: 2, 4 or 8; --ways: {SYNCHRONOUS}; {'; '.join(OUTER)}"
        )
        return 2
    inners = harness.chosen_cases(args.cases, INNER)
    runs = Runs(args.runs, args.minutes)
    experiment = Experiment(args.size, args.init, args.steps, runs, args.json)
    # First the learning rate of each inner optimizer and way, then the runs that are compared.
    for inner, way in product(inners, ways):
        if args.lr:
            experiment.rates[inner, way] = args.lr
        else:
            experiment.sweep(inner, way)
    for jobs, seed in cells(jobs_list, range(args.first_seed, args.first_seed + args.seeds)):
        for inner, way in product(inners, ways):
            experiment.measure(inner, way, jobs, seed)
    title = f"Joined jobs, {args.size} parameters, {args.steps} steps"
    return finish(experiment.rows(), args.json, title)


if __name__ == "__main__":
    sys.exit(main())
