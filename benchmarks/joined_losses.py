"""Simulates jobs that join in a single process, and compares the losses of different ways to join.

    python benchmarks/joined_losses.py --json FILE [--cases NAME,...] [--steps 1500] [--seeds 3]
        [--first-seed 0] [--ways NAME;...] [--jobs 2] [--runs FILE] [--minutes M]

The jobs are K copies of a byte-level GPT that train on real text: with AdamW, warm-up, a cosine schedule
(down to a tenth) and clipping. Outer steps, aggregates and codecs are those of holmes. There is no
network, so that only the algorithm affects the losses. They are compared with a single synchronous job
and with a single job alone, after the same number of steps:

    evaluation loss       of the mean weights of the jobs, on text that no job has read
    of one job's weights  the same, of the weights in the first job's checkpoint
    training loss         of the weights of each job, as the mean of the last 50 steps; it has the noise of
                          small batches

Rows of ways that are not chosen are kept in FILE.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import NamedTuple

import harness
import outer_steps  # noqa: F401
import torch
from harness import Row, Runs, finish, kept_rows, parser, tell, write
from torch.nn import functional

from holmes_ext.join.codecs import codec_of, residual_dtype
from holmes_ext.join.orthogonal import Matrices
from holmes_ext.join.rounds.aggregate import combine
from holmes_ext.join.settings import OuterSettings, parse_outer
from holmes_ext.join.shards.ownership import fragment_cuts
from holmes_ext.join.shards.weights import Part, Tensor, Weights
from holmes_ext.samples import examples

sys.path.insert(0, str(examples() / "plain_torch"))
from train import GPT, topics  # noqa: E402

SEQUENCE = 64  # tokens
ROWS = 8  # sequences of a batch
CLIP = 1.0  # largest norm of a gradient
STEPS = 1500
#: Number of parameters and largest inner learning rate -> layers, hidden size, heads, that rate.
CASES = {
    "0.12 M at 8e-3": (2, 64, 2, 8e-3),
    "0.12 M at 4e-3": (2, 64, 2, 4e-3),
    "0.12 M at 2e-3": (2, 64, 2, 2e-3),
    "0.8 M at 4e-3": (4, 128, 4, 4e-3),
    "0.8 M at 2e-3": (4, 128, 4, 2e-3),
    "2.7 M at 2e-3": (6, 192, 6, 2e-3),
}
MEASURED = "evaluation loss", "evaluation loss of one job's weights", "training loss"
#: Way to join -> value of --holmes-outer.
WAYS = {
    "diloco": "algorithm=diloco",
    "lr 0.7, momentum 0.9": "algorithm=diloco,lr=0.7,momentum=0.9",
    "lr 1, momentum 0.7": "algorithm=diloco,lr=1,momentum=0.7",
    "lr 1, momentum 0.6": "algorithm=diloco,lr=1,momentum=0.6",
    "lr 1, momentum 0.5": "algorithm=diloco,lr=1,momentum=0.5",
    "lr 1, momentum 0.4": "algorithm=diloco,lr=1,momentum=0.4",
    "lr 0.7, momentum 0.5": "algorithm=diloco,lr=0.7,momentum=0.5",
    "lr 1.41, momentum 0": "algorithm=diloco,lr=1.41,momentum=0",
    "lr 1, momentum 0": "algorithm=diloco,lr=1,momentum=0",
    "delay 1": "algorithm=diloco,delay=1",
    "average, delay 5": "algorithm=average,every=30,fragments=1,delay=5,compress=off",
    "average of 4 steps": "algorithm=average,every=4,fragments=1,delay=0,compress=off",
    "average of every step": "algorithm=average,every=1,fragments=1,delay=0,compress=off",
    "diloco of whole weights": "algorithm=diloco,every=30,fragments=1,delay=0,compress=off",
    "diloco, every 16": "algorithm=diloco,every=16,fragments=1,delay=0,compress=off",
    "delay 5, mix 0": "algorithm=diloco,every=30,fragments=1,delay=5,mix=0,compress=off",
    "delay 5, mix 0.5": "algorithm=diloco,every=30,fragments=1,delay=5,mix=0.5,compress=off",
    "muon": "algorithm=muon",
    "float32": "algorithm=diloco,compress=off",
    "int8": "algorithm=diloco,compress=int8",
    "muon, 2bit, every 208": "algorithm=muon,compress=2bit,every=208",
    "2bit, every 208": "algorithm=diloco,compress=2bit,every=208",
    "co2": "algorithm=co2,every=30,fragments=1,compress=off",
}


class Comparison(NamedTuple):
    """Two methods of joining jobs, and a bound on the difference of their evaluation losses.

    The difference is the loss of `way` minus the loss of `baseline`. The bound is the noise: the
    largest minus the smallest loss of the method `noise_of`, over several random seeds. The
    difference must be at most the noise (sign "<="), or at least the noise (sign ">=").
    """

    way: str  # method: a key of WAYS, "synchronous" (one job) or "alone" (jobs do not join)
    baseline: str  # another method
    noise_of: str  # the noise is computed from the seeds of this method
    sign: str  # "<=": the difference must be at most the noise; ">=": at least the noise


COMPARED = (
    Comparison("diloco", "synchronous", noise_of="synchronous", sign="<="),
    Comparison("alone", "diloco", noise_of="synchronous", sign=">="),
    Comparison("muon", "synchronous", noise_of="synchronous", sign="<="),
    Comparison("muon, 2bit, every 208", "muon", noise_of="muon", sign="<="),
    Comparison("2bit, every 208", "diloco", noise_of="diloco", sign="<="),
)


class Losses(NamedTuple):
    """Three losses of one training run, in nats for each byte of text.

    The results file names them "evaluation loss", "evaluation loss of one job's weights" and
    "training loss".
    """

    evaluation: float  # of the mean weights of all jobs, on text that no job has read
    evaluation_of_one_job: float  # of the first job's weights, on the same text
    training: float  # mean over the jobs and the last 50 steps


def flatten(model: torch.nn.Module) -> torch.Tensor:
    """Move all weights of a model into one flat tensor, and return it.

    An outer step changes a range of the flat tensor, whatever parameters are there. The parameters
    become views, so that they change with it.
    """
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    offset = 0
    for p in model.parameters():
        p.data = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    return flat


class JobTrainer:
    """Training of one job: its model, its optimizer and its learning-rate schedule.

    The weights of the model are views of a flat tensor. The optimizer updates it in place.
    """

    def __init__(self, case: str, seed: int, steps: int):
        """Make a model with random weights, its optimizer and its learning-rate schedule.

        Args:
            case: A key of CASES, for the size and the learning rate.
            seed: Seed of the weights.
            steps: Training steps. A cosine over them lowers the learning rate to a tenth.
        """
        torch.manual_seed(seed)
        *size, lr = CASES[case]  # layers, hidden size, heads; learning rate
        self.model = GPT(*size, SEQUENCE)
        self.flat = flatten(self.model)
        # The inner optimizer takes the training steps of this job. Outer steps combine all jobs.
        self.inner = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.inner,
            # 50 steps of warm-up, and a cosine from 1 to 0.1
            lambda k: (
                min(1, (k + 1) / 50) * (0.55 + 0.45 * math.cos(math.pi * min(k, steps) / steps))
            ),
        )

    def step(self, tokens: torch.Tensor) -> float:
        """Train one step, and return the loss before it."""
        loss = functional.cross_entropy(
            self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.inner.step()
        self.inner.zero_grad()
        self.schedule.step()
        return loss.item()


class Captured(NamedTuple):
    """Pseudo-gradient of a fragment, between its computation and the outer step that applies it."""

    gradient: torch.Tensor  # mean over the jobs
    weights: list[torch.Tensor]  # of each job, copied when the pseudo-gradient was computed


class OuterLoop:
    """Outer steps of all jobs in one process: the work of the ranks of all jobs and of the coordinator.

    The weights are divided into fragments (ranges of the flat tensor), whose outer steps take turns.
    """

    def __init__(self, settings: OuterSettings, trainers: list[JobTrainer]):
        """Allocate the state of the outer optimizer.

        Args:
            settings: The algorithm, its learning rate and momentum, and the number of fragments.
            trainers: The jobs.
        """
        self.settings = settings
        self.trainers = trainers
        self.algorithm = settings.outer_algorithm()
        self.shares = [1 / len(trainers)] * len(trainers)  # all jobs read equally many tokens
        self.period = settings.period  # training steps between the exchanges of two fragments
        self.in_period = 0  # training steps since the last exchange
        tensors = [
            Tensor(name, tuple(p.shape), "float32")
            for name, p in trainers[0].model.named_parameters()
        ]
        # All elements of the model, as one part: this process is the only rank of each job.
        weights = Weights("all", tensors, [Part(0, trainers[0].flat)])
        # Some algorithms (Muon) treat whole matrices, so no fragment may begin inside of a matrix.
        matrices = weights.matrices if self.algorithm.of_matrices else []
        cuts = fragment_cuts(
            weights.total, settings.fragments, [(matrix.start, matrix.stop) for matrix in matrices]
        )
        self.ranges = [slice(*pair) for pair in pairwise(cuts)]  # of each fragment
        self.matrices = []  # of each fragment, with positions from its start
        for begin, end in pairwise(cuts):
            in_fragment = [matrix for matrix in matrices if begin <= matrix.start < end]
            self.matrices.append(
                Matrices([replace(matrix, start=matrix.start - begin) for matrix in in_fragment])
            )
        # Weights of each fragment after its last outer step.
        self.anchors = [trainers[0].flat[part].clone() for part in self.ranges]
        # Rounding errors of the codecs int8 and 2bit are kept in bfloat16, and then the outer momentum
        # is, too; None: the errors are not kept.
        error_dtype = residual_dtype(settings)
        momentum_dtype = None
        if self.algorithm.keeps_momentum:
            momentum_dtype = torch.bfloat16 if error_dtype == torch.bfloat16 else torch.float32
        self.momenta = _zeros_like(self.anchors, momentum_dtype)  # of each fragment
        self.codec = codec_of(settings)  # encodes pseudo-gradients for the network (`compress`)
        # For each job, the codec's rounding errors in each fragment.
        self.residuals = [_zeros_like(self.anchors, error_dtype) for _ in trainers]
        # By fragment: pseudo-gradients that are computed, and those that are on their way.
        self.captured: dict[int, Captured] = {}
        self.in_flight: dict[int, Captured] = {}
        self.round = 0
        self.encoded_bytes = 0  # of the pseudo-gradients of all jobs

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that a job has sent in all: its pseudo-gradients, once for each other job."""
        jobs = len(self.trainers)
        return self.encoded_bytes // jobs * (jobs - 1)

    def after_step(self) -> None:
        """Count a training step; the algorithm then sends or applies pseudo-gradients if it is time."""
        self.in_period += 1
        self.algorithm.after_step(self)

    def capture(self) -> int:
        """Compute the mean pseudo-gradient of the next fragment, and return the fragment's number.

        A job's pseudo-gradient is the anchor (its weights after the last outer step) less its
        weights now. Each is encoded and decoded as if it were sent to the other jobs. The mean is
        kept in `captured`, with copies of the weights that it was computed from.
        """
        fragment = self.round % len(self.ranges)  # fragments take turns
        self.round += 1
        weights_now = [trainer.flat[self.ranges[fragment]].clone() for trainer in self.trainers]
        received = [
            self.encode_and_decode(
                self.anchors[fragment] - weights, residual=self.residuals[job][fragment]
            )
            for job, weights in enumerate(weights_now)
        ]
        mean = combine(self.settings, received, self.shares)
        self.captured[fragment] = Captured(mean, weights_now)
        return fragment

    def submit(self, fragment: int) -> None:
        self.in_flight[fragment] = self.captured.pop(fragment)

    def submitted(self) -> list[int]:
        return list(self.in_flight)

    def new_period(self) -> None:
        """Set the number of training steps since the last exchange of all fragments to 0.

        The outer algorithm calls this. After `period` steps, all fragments have been exchanged
        once.
        """
        self.in_period = 0

    def finish_round(self, fragment: int) -> None:
        """Take the outer step of a fragment (a part of the weights), and update it in all jobs.

        The outer step moves the anchor (the weights after the last outer step, equal in all jobs)
        by the pseudo-gradient that was submitted since the last call. If there is none, the anchor
        stays. Then the algorithm mixes the anchor with the weights of each job, since all have trained on
        meanwhile.
        """
        momentum = self.momenta[fragment]
        anchor = self.anchors[fragment]
        submitted = self.in_flight.pop(fragment, None)
        if submitted is not None:
            gradient = submitted.gradient
            # Divisor for an outdated pseudo-gradient; 1: it counts in full. CO2's gap grows with
            # the distance that the anchor has moved since the pseudo-gradient was computed.
            gap = 1.0
            if self.algorithm.needs_gap:
                momentum_square = 0.0
                if momentum is not None:
                    momentum_square = float(momentum.float().square().sum())
                gap = self.algorithm.gap_of(momentum_square, float(gradient.square().sum()))
            self.algorithm.step(
                anchor,
                momentum,
                gradient,
                # The outer momentum: the user's setting, or computed from the jobs' shares of the
                # tokens.
                mu=self.algorithm.momentum_of(self.shares),
                gap=gap,
                matrices=self.matrices[fragment],  # positions of weight matrices, for Muon
            )
        for job, trainer in enumerate(self.trainers):
            local = trainer.flat[self.ranges[fragment]]
            # Some algorithms keep the progress since the pseudo-gradient was computed.
            weights_then = None
            if submitted is not None and self.algorithm.keeps_progress:
                weights_then = submitted.weights[job]
            local.copy_(self.algorithm.mixed(local, weights_then, anchor))

    def encode_and_decode(
        self, gradient: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a pseudo-gradient as the receiver decodes it, and keep the rounding error.

        Args:
            gradient: The pseudo-gradient of one job.
            residual: Rounding error of the last transfer. It is added before encoding, and replaced by the
                new error. None if the codec keeps none.
        """
        # The residual may be stored in bf16, but the codec computes in float32. encode() adds the
        # old error to the gradient, and writes the new one into the same tensor.
        residual32 = residual.float() if residual is not None else None
        encoded = self.codec.encode(gradient, residual32)
        self.encoded_bytes += encoded.nbytes
        decoded = self.codec.decode(encoded, gradient)
        if residual is not None:
            residual.copy_(residual32)
        return decoded


def _zeros_like(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype | None
) -> list[torch.Tensor | None]:
    """Return a tensor of zeros for each flat tensor, of the same length; None for each if no dtype."""
    if dtype is None:
        return [None] * len(tensors)
    return [torch.zeros(len(tensor), dtype=dtype) for tensor in tensors]


def read_texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text for training and that for evaluation (the last twentieth), as bytes."""
    text = torch.frombuffer(
        bytearray("\n\n".join(topics[name] for name in sorted(topics)), "utf-8"), dtype=torch.uint8
    )
    return text[: len(text) * 19 // 20], text[len(text) * 19 // 20 :]


def batch(text: torch.Tensor, seed: int, number: int, rows: int = ROWS) -> torch.Tensor:
    """Return the training sequences of one step: random excerpts of SEQUENCE + 1 bytes.

    Args:
        text: The training text, as bytes.
        seed: Seed of the training.
        number: Number of the batch. The same seed and number give the same batch.
        rows: Number of the sequences.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    starts = torch.randint(len(text) - SEQUENCE - 1, (rows,), generator=generator)
    return torch.stack([text[start : start + SEQUENCE + 1] for start in starts]).long()


@torch.no_grad()
def evaluate(model: torch.nn.Module, text: torch.Tensor) -> float:
    """Return the mean loss of a model on a text, in nats for each byte."""
    rows = text[: (len(text) - 1) // SEQUENCE * SEQUENCE + 1]
    inputs, labels = rows[:-1].view(-1, SEQUENCE).long(), rows[1:].view(-1, SEQUENCE).long()
    pairs = zip(inputs.split(64), labels.split(64))
    return statistics.fmean(
        float(functional.cross_entropy(model(x).flatten(0, 1), y.flatten())) for x, y in pairs
    )


def train(
    case: str,
    way: str,
    seed: int,
    jobs: int,
    steps: int,
    training: torch.Tensor,
    held_out: torch.Tensor,
) -> Losses:
    """Train jobs that exchange weights by a method, and return their losses at the end.

    Args:
        case: A key of CASES: model size and learning rate.
        way: The method. "synchronous": a single job reads the batches of all jobs in each step.
            "alone": a single job reads only its own batches. A key of WAYS: several jobs exchange
            weights now and then, with the settings in WAYS (values of --holmes-outer).
        seed: Seed of the weights and of the order of the text.
        jobs: Number of jobs.
        steps: Training steps of each job.
        training: The text for training, as bytes.
        held_out: The text for evaluation, as bytes.
    """
    joins = way in WAYS
    trained_jobs = jobs if joins else 1  # "synchronous" and "alone" train a single job
    trainers = [JobTrainer(case, seed, steps) for _ in range(trained_jobs)]
    outer_loop = OuterLoop(parse_outer(WAYS[way]), trainers) if joins else None
    losses = []
    for step in range(steps):
        batches = [batch(training, seed, step * jobs + k) for k in range(jobs)]
        if way == "synchronous":
            batches = [torch.cat(batches)]
        # With "alone", zip() ends after the first batch.
        losses_of_step = [trainer.step(rows) for trainer, rows in zip(trainers, batches)]
        losses.append(statistics.fmean(losses_of_step))
        if outer_loop is not None:
            outer_loop.after_step()
    first = trainers[0]
    evaluation_of_one_job = evaluate(first.model, held_out)
    # The first job's model gets the mean weights. Its own were evaluated above.
    first.flat.copy_(torch.stack([trainer.flat for trainer in trainers]).mean(0))
    return Losses(
        evaluation=evaluate(first.model, held_out),
        evaluation_of_one_job=evaluation_of_one_job,
        training=statistics.fmean(losses[-50:]),  # single steps have the noise of small batches
    )


def differences(rows: list[Row]) -> list[Row]:
    """Return rows with the difference between the evaluation losses of two methods of joining jobs.

    COMPARED has the pairs of methods. A row's target is the noise: the largest minus the smallest
    loss of one method over the seeds. The target "<= noise" demands that the first method is not
    worse than the second, ">= noise" that it is clearly worse.

    Args:
        rows: All rows. A case with a single seed shows no noise, and is left out.
    """
    evaluation, *_ = MEASURED  # the metric is "evaluation loss, WAY"
    row_of = {(row.case, row.metric.removeprefix(f"{evaluation}, ")): row for row in rows}
    cases = dict.fromkeys(row.case for row in rows)
    compared = []
    for case, comparison in product(cases, COMPARED):
        row = row_of.get((case, comparison.way))
        baseline = row_of.get((case, comparison.baseline))
        noise_row = row_of.get((case, comparison.noise_of))
        if row is None or baseline is None or noise_row is None:
            continue
        smallest, largest = noise_row.spread  # over the seeds
        noise = largest - smallest
        if not noise:
            continue
        compared.append(
            Row.median(
                case,
                f"{comparison.way} - {comparison.baseline}",
                [row.value - baseline.value],
                unit="nats",
                emulated=False,
                target=f"{comparison.sign} {noise:.3f}",
            )
        )
    return compared


def main() -> int:
    """Train jobs with the chosen models and methods of joining; print and write their losses.

    Returns:
        The exit status: 2 if a method is unknown, 1 if a target is not met, else 0.
    """
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=STEPS)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--first-seed", type=int, default=0)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument(
        "--ways",
        default="",
        metavar="NAME;...",
        help="only these; or --holmes-outer texts of your own",
    )
    Runs.add_arguments(arguments)
    args = arguments.parse_args()
    runs = Runs(args.runs, args.minutes)
    torch.set_num_threads(1)
    training, held_out = read_texts()
    ways = [name.strip() for name in args.ways.split(";") if name.strip()]
    if not ways:
        ways = ["synchronous", "alone", *WAYS]
    WAYS.update({name: name for name in ways if "=" in name})  # settings of the user
    unknown = [name for name in ways if name not in ("synchronous", "alone", *WAYS)]
    if unknown:
        tell(
            f"joined_losses.py: no way {unknown[0]!r}; there are synchronous, alone, {', '.join(WAYS)}"
        )
        return 2
    cases = harness.chosen_cases(args.cases, CASES)
    case_suffix = f", {args.jobs} jobs" if args.jobs != 2 else ""
    case_suffix += f", {args.steps} steps" if args.steps != STEPS else ""
    measured_now = {  # (case, metric) of each row that this program writes anew
        (case + case_suffix, f"{name}, {way}") for case, name, way in product(cases, MEASURED, ways)
    }
    earlier_rows = [
        row
        for row in kept_rows(args.json)
        if (row.case, row.metric) not in measured_now and not row.target
    ]
    rows: dict[tuple[str, str], Row] = {(row.case, row.metric): row for row in earlier_rows}
    for case, way in product(cases, ways):
        losses = []
        for seed in range(args.first_seed, args.first_seed + args.seeds):

            def train_once(case: str = case, way: str = way, seed: int = seed) -> Losses:
                return train(case, way, seed, args.jobs, args.steps, training, held_out)

            losses_of_run = runs.of(f"{case}{case_suffix}, {way}, seed {seed}", train_once)
            if losses_of_run:
                losses.append(losses_of_run)
            for name, values in zip(MEASURED, zip(*losses)):
                metric = f"{name}, {way}"
                row = Row.of(
                    case + case_suffix,
                    metric,
                    statistics.fmean(values),
                    unit="nats",
                    spread=(min(values), max(values)),
                    emulated=False,
                )
                rows[row.case, metric] = row
            write([*rows.values()], args.json)
    title = f"{args.jobs} joined jobs of batch {ROWS}, {args.steps} steps, {args.seeds} seeds"
    return finish([*rows.values(), *differences([*rows.values()])], args.json, title)


if __name__ == "__main__":
    sys.exit(main())
