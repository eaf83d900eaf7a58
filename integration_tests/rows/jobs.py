"""The jobs of README's table, one or more for each part of each row.

Every job has two clusters: a and b's NICs identify them, so `--holmes` is all that a command adds.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkouts import find_checkout

from holmes_ext.lab.process.job import RunResult
from integration_tests.gpu import commands
from integration_tests.gpu.commands import LOG, Command
from integration_tests.jobs import MEGATRON, ON_CPU, PRELOAD_MEGATRON, ROOT, SIZE, losses
from integration_tests.rows.job import (
    EXACT,
    FOLDER,
    SAVED,
    STEPS,
    Checkpoints,
    Group,
    Job,
    installed,
)
from integration_tests.stacks.torchtitan_job import INSTALLED as TORCHTITAN

HERE = ROOT / "integration_tests" / "rows"
EXAMPLES = ROOT / "examples"
COUNT = ("--steps", str(STEPS))
LAYERS = "--layers 4 --hidden 64 --heads 4 --sequence 16 --micro-batch 2 --micro-batches 4".split()

INSIDE = frozenset({Group("data", "inside", "ib"), Group("data", "inside", "roce")})
ACROSS = frozenset({Group("data", "across", "ethernet")})
TWO_LEVELS = INSIDE | ACROSS
WORLD = frozenset({Group("world", "across", "ethernet")})
PIPELINE = INSIDE | {Group("pipeline", "across", "ethernet")}


def read_log(result: RunResult, log: Path) -> list[float]:
    return losses(log)


def script(*words: str, preload: tuple[str, ...] = ("torch",), read=read_log,
           env: dict[str, str] | None = None) -> Callable[[Path], Command]:
    """Return what makes the command of a script that needs no preparation."""

    def made(folder: Path) -> Command:
        return Command(words[0], words, folder, preload, read, env or {})

    return made


def saved_in(*save: str, **more) -> Checkpoints:
    """Return the checkpoints of a script with --save, --save-after and --load."""
    return Checkpoints(("--save", FOLDER, "--save-after", str(SAVED)), ("--load", FOLDER), **more)


# Any script, and torch itself.

TRAIN = (str(HERE / "train.py"), "--log-file", LOG, *COUNT)
LAUNCHED = "the launcher starts processes; checkpoints are tested with the frameworks"


def launched(part: str, **more) -> Job:
    """Return the job of a launcher: a loop that sums its gradients by hand."""
    return Job(part, script(*TRAIN), WORLD, LAUNCHED, names_reductions=False, **more)


def torch_job(part: str, groups: frozenset[Group], *words: str, **more) -> Job:
    return Job(part, script(*TRAIN, *words), groups, saved_in(), **more)


# -S: this Python does not read .pth files, so nothing but -m can switch holmes on.
WITHOUT_PTH = "env PYTHONPATH={site} {{python}} -S -m holmes_ext {{words}}".format(
    site=installed(str(ROOT), sysconfig.get_path("purelib"))
)

TORCH = (
    launched("torchrun", launcher="torchrun"),
    launched("srun", launcher="srun"),
    launched("mpirun", launcher="mpirun"),
    launched("deepspeed", launcher="deepspeed"),
    launched(
        "a launcher that takes no flags",
        holmes=(),
        holmes_env={"HOLMES": "1"},
        shell="{python} {words}",
    ),
    launched("a Python that ignores .pth files", holmes=(), shell=WITHOUT_PTH),
    torch_job("DDP", TWO_LEVELS, "--way", "ddp", features=frozenset({"ddp"})),
    Job(
        "torch's pipelining",
        script(str(EXAMPLES / "torch_pipelining" / "train.py"), *LAYERS, *COUNT, "--log-file", LOG),
        PIPELINE,
        saved_in(),
        features=frozenset({"pipelining", "ddp"}),
        names_reductions=False,
    ),
    Job(
        "FSDP2",
        script(str(EXAMPLES / "fsdp2" / "train.py"), *LAYERS, *COUNT, "--log-file", LOG),
        TWO_LEVELS,
        saved_in(),
        holmes=("--holmes", "--holmes-fsdp", "hybrid"),
        features=frozenset({"fsdp"}),
        names_reductions=False,
    ),
    Job(
        "HSDP",
        script(
            str(EXAMPLES / "fsdp2" / "train.py"), *LAYERS, *COUNT, "--replicas", "2", "--log-file", LOG
        ),
        TWO_LEVELS,
        saved_in(),
        features=frozenset({"fsdp"}),
        names_reductions=False,
    ),
    torch_job(
        "FSDP1",
        TWO_LEVELS,
        "--way",
        "fsdp1",
        holmes=("--holmes", "--holmes-fsdp", "hybrid"),
        features=frozenset({"fsdp"}),
        names_reductions=False,
    ),
    torch_job(
        "a plain torch loop", TWO_LEVELS, "--way", "loop", holmes=("--way", "reducer", "--holmes")
    ),
)

# Hugging Face, Lightning.

SMALL = "--layers 2 --hidden 64 --sequence 16 --micro-batch 2 --micro-batches 2".split()
HUGGING_FACE = ("torch", "transformers.trainer")
ACCELERATE = (
    "{python} -m accelerate.commands.launch --cpu --num_processes 4 --num_machines 4"
    " --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT"
    " {words}"
)


def newest_is_saved(folder: Path) -> None:
    """Remove what Trainer saves at its end: --resume takes the newest checkpoint."""
    shutil.rmtree(folder / f"checkpoint-{STEPS}", ignore_errors=True)


FRAMEWORKS = (
    Job(
        "Trainer",
        script(
            str(EXAMPLES / "trainer" / "train.py"), *SMALL, *COUNT, "--log-file", LOG,
            preload=HUGGING_FACE,
        ),
        TWO_LEVELS,
        Checkpoints(
            ("--output", FOLDER, "--save-steps", str(SAVED)),
            ("--output", FOLDER, "--resume"),
            rewind=newest_is_saved,
        ),
        features=frozenset({"ddp"}),
        packages=("transformers", "accelerate"),
    ),
    Job(
        "Accelerate",
        script(str(HERE / "accelerate_loop.py"), *COUNT, "--log-file", LOG, preload=("torch", "accelerate")),
        TWO_LEVELS,
        Checkpoints(
            ("--save", FOLDER, "--save-after", str(SAVED)),
            ("--load", FOLDER, "--save-after", str(SAVED)),
        ),
        shell=ACCELERATE,
        features=frozenset({"ddp"}),
        packages=("accelerate",),
    ),
    Job(
        "Lightning",
        script(
            str(EXAMPLES / "lightning" / "train.py"), *SMALL, *COUNT, "--log-file", LOG,
            preload=(*HUGGING_FACE, "lightning"),
        ),
        TWO_LEVELS,
        # Lightning's Trainer does not skip the batches of an epoch that it has trained on.
        Checkpoints(
            ("--output", FOLDER, "--save-steps", str(SAVED)),
            ("--output", FOLDER, "--resume"),
            exact_in_stock=False,
        ),
        features=frozenset({"ddp", "lightning-ranks"}),
        packages=("lightning", "transformers"),
    ),
)

# DeepSpeed.

DEEPSPEED = ("torch", "deepspeed")


def latest_is_saved(folder: Path) -> None:
    (folder / "latest").write_text(f"step{SAVED}")


def zero(stage: int) -> Job:
    words = (str(ROOT / "integration_tests" / "gpu" / "zero.py"), "--stage", str(stage), *COUNT)
    two_levels = stage < 3  # the collectives of ZeRO 3 stay DeepSpeed's own
    return Job(
        "DeepSpeed's ZeRO 0 to 3",
        script(*words, preload=DEEPSPEED, read=commands._printed),
        TWO_LEVELS if two_levels else WORLD,
        saved_in(),
        variant=f"ZeRO {stage}",
        names_reductions=two_levels,
        features=frozenset({"two-level", "telemetry-deepspeed"}),
        packages=("deepspeed",),
    )


DEEPSPEED_JOBS = (
    Job(
        "DeepSpeed's pipeline engine",
        script(
            str(EXAMPLES / "deepspeed_pipeline" / "train.py"), *SIZE, *COUNT, "--stages", "2", "--log",
            LOG, preload=DEEPSPEED,
        ),
        PIPELINE,
        Checkpoints(
            ("--save", FOLDER, "--save-every", str(SAVED)), ("--load", FOLDER), rewind=latest_is_saved
        ),
        holmes=("--holmes", "--holmes-sizes", "pipeline=2"),
        features=frozenset({"deepspeed-p2p", "deepspeed-edges", "overlap", "telemetry-deepspeed"}),
        stages=2,
        tolerance=EXACT,
        packages=("deepspeed",),
    ),
    *(zero(stage) for stage in range(4)),
)

# Megatron.


def latest_of_megatron_core(folder: Path) -> None:
    file = folder / "latest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "step": SAVED}))


def latest_of_megatron(folder: Path) -> None:
    """Make the checkpoint of step SAVED the newest, for Megatron's trackers and for DeepSpeed's."""
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    if (folder / "latest").exists():
        (folder / "latest").write_text(f"global_step{SAVED}")


def second_of_two(printed: list[float]) -> list[float]:
    """Return the losses of the two steps after a resume.

    Megatron-LM (stock too) prints the first, then the mean of both: its mean does not start anew
    after the first report of a resumed run.
    """
    first, mean = printed
    return [first, 2 * mean - first]


SAVING = ("--save", FOLDER, "--save-interval", str(SAVED))
ITERATIONS = ("--train-iters", str(STEPS))


def megatron_core(program: str, variant: str, **more) -> Job:
    words = (*MEGATRON, "--pipeline", "2", "--micro-batches", "4", *COUNT, "--log", LOG)
    return Job(
        "megatron-core",
        script(program, *words, preload=PRELOAD_MEGATRON, env={"PYTHONPATH": installed(ON_CPU)}),
        PIPELINE,
        Checkpoints(
            ("--save", FOLDER, "--save-every", str(SAVED)),
            ("--load", FOLDER),
            rewind=latest_of_megatron_core,
        ),
        variant=variant,
        stages=2,
        tolerance=EXACT,
        packages=("megatron.core",),
        **more,
    )


def with_words(command: Command, *words: str) -> Command:
    """Return the command with more words. The last one of a flag that is given twice counts."""
    return replace(command, words=(*command.words, *words))


def megatron_lm(folder: Path) -> Command:
    """Without the distributed optimizer, whose checkpoints Megatron-LM does not load on CPUs."""
    command = commands.megatron_lm(folder, find_checkout("Megatron-LM"))
    words = tuple(word for word in command.words if word != "--use-distributed-optimizer")
    return replace(command, words=(*words, *ITERATIONS))


def megatron_deepspeed(folder: Path) -> Command:
    checkout = find_checkout("Megatron-DeepSpeed")
    return with_words(commands.megatron_deepspeed(folder, checkout, 1), *ITERATIONS)


MEGATRON_JOBS = (
    megatron_core(
        str(EXAMPLES / "megatron_core" / "train.py"), "--holmes", names_reductions=False
    ),
    megatron_core(
        str(HERE / "megatron_core_call.py"),
        "initialize_model_parallel",
        holmes=("--call-holmes",),
    ),
    Job(
        "Megatron-LM's pretrain_gpt.py",
        megatron_lm,
        PIPELINE,
        Checkpoints(
            SAVING,
            ("--load", FOLDER, "--exit-on-missing-checkpoint"),
            rewind=latest_of_megatron,
            resumed_losses=second_of_two,
        ),
        stages=2,
        packages=("pybind11",),
        checkout="Megatron-LM",
    ),
    Job(
        "Megatron-DeepSpeed's pretrain_gpt.py",
        megatron_deepspeed,
        PIPELINE,
        Checkpoints(SAVING, ("--load", FOLDER), rewind=latest_of_megatron),
        holmes_env={"STAND_INS": ""},  # holmes serves what current packages lack
        features=frozenset({"deepspeed-edges", "overlap"}),
        stages=2,
        packages=("deepspeed", "pybind11", "regex", "six", "transformers"),
        checkout="Megatron-DeepSpeed",
    ),
)

# torchtitan.


def torchtitan(folder: Path) -> Command:
    """HSDP, which also saves: the command of integration_tests/gpu only loads a seed checkpoint."""
    command = commands.torchtitan(folder, "HSDP", 4)
    words = tuple(word for word in command.words if word != "--checkpoint.load_only")
    return replace(command, words=(*words, "--training.steps", str(STEPS)))


TORCHTITAN_JOBS = (
    Job(
        "torchtitan",
        torchtitan,
        TWO_LEVELS,
        Checkpoints(
            ("--checkpoint.interval", str(SAVED), "--checkpoint.folder", FOLDER),
            ("--checkpoint.load_step", str(SAVED), "--checkpoint.folder", FOLDER),
        ),
        features=frozenset({"fsdp"}),
        names_reductions=False,
        packages=("tokenizers",),
        folder=TORCHTITAN,
    ),
)

JOBS = (*TORCH, *FRAMEWORKS, *DEEPSPEED_JOBS, *MEGATRON_JOBS, *TORCHTITAN_JOBS)
