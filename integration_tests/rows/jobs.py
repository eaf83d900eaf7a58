"""Lists the jobs of README's table "your job": at least one for each entry of each row.

The nodes of every job form two clusters, a (InfiniBand) and b (RoCE), joined by Ethernet. The NICs
identify the clusters, so that `--holmes` needs no cluster.toml.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from checkouts import find_checkout

from holmes_ext.lab.process.job import RunResult
from integration_tests.gpu import commands
from integration_tests.gpu.commands import LOG, Command
from integration_tests.jobs import MEGATRON, ON_CPU, PRELOAD_MEGATRON, ROOT, SIZE, losses
from integration_tests.rows.job import (
    CHECKPOINT_FOLDER,
    EXACT,
    NO_VARIABLES,
    SAVED_STEP,
    STEPS,
    Checkpoints,
    Group,
    Job,
    python_path,
)
from integration_tests.stacks.torchtitan_job import INSTALLED as TORCHTITAN_FOLDER

HERE = ROOT / "integration_tests" / "rows"
EXAMPLES = ROOT / "examples"

# Arguments of the scripts. LOG stands for the file to which a script writes the loss of each step.

STEPS_FLAG = ("--steps", str(STEPS))
LOG_FLAG = ("--log-file", LOG)
#: Model and batch of examples/fsdp2 and examples/torch_pipelining: a transformer of four layers.
FOUR_LAYERS = "--layers 4 --hidden 64 --heads 4 --sequence 16 --micro-batch 2 --micro-batches 4".split()
#: Model and batch of examples/trainer and examples/lightning.
TWO_LAYERS = "--layers 2 --hidden 64 --sequence 16 --micro-batch 2 --micro-batches 2".split()

# Process groups that the report must list.

#: Data-parallel groups inside each cluster.
DATA_INSIDE_CLUSTERS = frozenset(
    {
        Group(kind="data", where="inside", fabric="ib"),
        Group(kind="data", where="inside", fabric="roce"),
    }
)
#: The two levels of a hierarchical all-reduce: inside each cluster, and across both.
TWO_LEVELS = DATA_INSIDE_CLUSTERS | {Group(kind="data", where="across", fabric="ethernet")}
#: One group of all ranks: holmes does not split the collectives of the job into levels.
WORLD = frozenset({Group(kind="world", where="across", fabric="ethernet")})
#: A pipeline stage in each cluster: gradients stay inside, activations cross.
STAGE_A_CLUSTER = DATA_INSIDE_CLUSTERS | {
    Group(kind="pipeline", where="across", fabric="ethernet")
}

#: Checkpoints of a script with --save, --save-after and --load.
SAVE_AFTER = Checkpoints(
    save_arguments=("--save", CHECKPOINT_FOLDER, "--save-after", str(SAVED_STEP)),
    load_arguments=("--load", CHECKPOINT_FOLDER),
)
#: holmes shards FSDP weights inside each cluster and replicates them across the clusters.
HYBRID_FSDP = ("--holmes", "--holmes-fsdp", "hybrid")


def read_log(result: RunResult, log: Path) -> list[float]:
    """Return the losses that a script wrote to its log."""
    return losses(log)


def script(
    path: Path,
    *arguments: str,
    preload: tuple[str, ...] = ("torch",),
    read: Callable[[RunResult, Path], list[float]] = read_log,
    env: Mapping[str, str] = NO_VARIABLES,
) -> Callable[[Path], Command]:
    """Return a Job.command for a script that needs no files to be prepared.

    Args:
        preload: Modules that the lab loads once, before it forks a process for each rank.
        read: Returns the losses of the run, from its output or its log.
    """

    def command(folder: Path) -> Command:
        return Command(
            name=path.name,
            words=(str(path), *arguments),
            folder=folder,
            preload=preload,
            read=read,
            env=env,
        )

    return command


# Any script, and torch itself.


def train_script(*arguments: str) -> Callable[[Path], Command]:
    return script(HERE / "train.py", *LOG_FLAG, *STEPS_FLAG, *arguments)


def loop_job(entry: str, **fields) -> Job:
    """Return a job for an entry about how processes start.

    The script reduces gradients by its own all-reduces over all ranks, which holmes leaves as they
    are. Checkpoints do not depend on the launcher, so that this job saves none.

    Args:
        fields: More fields of the Job.
    """
    return Job(
        entry=entry,
        command=train_script(),
        groups=WORLD,
        checkpoints=None,
        reports_reductions=False,
        **fields,
    )


#: -S: this Python reads no .pth files, so that only `-m holmes_ext` can switch holmes on.
PYTHON_WITHOUT_PTH = "env PYTHONPATH={folders} {{python}} -S -m holmes_ext {{words}}".format(
    folders=python_path(str(ROOT), sysconfig.get_path("purelib"))
)

TORCH_JOBS = (
    loop_job("torchrun", launcher="torchrun"),
    loop_job("srun", launcher="srun"),
    loop_job("mpirun", launcher="mpirun"),
    loop_job("deepspeed", launcher="deepspeed"),
    loop_job(
        "a launcher that takes no flags",
        holmes_arguments=(),
        holmes_env={"HOLMES": "1"},
        shell="{python} {words}",
    ),
    loop_job("a Python that ignores .pth files", holmes_arguments=(), shell=PYTHON_WITHOUT_PTH),
    Job(
        entry="DDP",
        command=train_script("--way", "ddp"),
        groups=TWO_LEVELS,
        checkpoints=SAVE_AFTER,
        features=frozenset({"ddp"}),
    ),
    Job(
        entry="torch's pipelining",
        command=script(
            EXAMPLES / "torch_pipelining" / "train.py", *FOUR_LAYERS, *STEPS_FLAG, *LOG_FLAG
        ),
        groups=STAGE_A_CLUSTER,
        checkpoints=SAVE_AFTER,
        features=frozenset({"pipelining", "ddp"}),
        reports_reductions=False,
    ),
    Job(
        entry="FSDP2",
        command=script(EXAMPLES / "fsdp2" / "train.py", *FOUR_LAYERS, *STEPS_FLAG, *LOG_FLAG),
        groups=TWO_LEVELS,
        checkpoints=SAVE_AFTER,
        holmes_arguments=HYBRID_FSDP,
        features=frozenset({"fsdp"}),
        reports_reductions=False,
    ),
    Job(
        entry="HSDP",
        command=script(
            EXAMPLES / "fsdp2" / "train.py",
            *FOUR_LAYERS,
            *STEPS_FLAG,
            *("--replicas", "2"),
            *LOG_FLAG,
        ),
        groups=TWO_LEVELS,
        checkpoints=SAVE_AFTER,
        features=frozenset({"fsdp"}),
        reports_reductions=False,
    ),
    Job(
        entry="FSDP1",
        command=train_script("--way", "fsdp1"),
        groups=TWO_LEVELS,
        checkpoints=SAVE_AFTER,
        holmes_arguments=HYBRID_FSDP,
        features=frozenset({"fsdp"}),
        reports_reductions=False,
    ),
    Job(
        entry="a plain torch loop",
        command=train_script("--way", "loop"),
        groups=TWO_LEVELS,
        checkpoints=SAVE_AFTER,
        holmes_arguments=("--way", "reducer", "--holmes"),  # the table changes this script
    ),
)

# Hugging Face and Lightning.

TRAINER_MODULES = ("torch", "transformers.trainer")
#: `accelerate launch` on each node, which then starts the one rank of that node.
ACCELERATE_LAUNCH = (
    "{python} -m accelerate.commands.launch --cpu --num_processes 4 --num_machines 4"
    " --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT"
    " {words}"
)


def remove_last_of_trainer(checkpoint_folder: Path) -> None:
    """Remove the checkpoint that Trainer saves at its end, because --resume takes the newest."""
    shutil.rmtree(checkpoint_folder / f"checkpoint-{STEPS}", ignore_errors=True)


TRAINER_JOBS = (
    Job(
        entry="Trainer",
        command=script(
            EXAMPLES / "trainer" / "train.py",
            *TWO_LAYERS,
            *STEPS_FLAG,
            *LOG_FLAG,
            preload=TRAINER_MODULES,
        ),
        groups=TWO_LEVELS,
        checkpoints=Checkpoints(
            save_arguments=("--output", CHECKPOINT_FOLDER, "--save-steps", str(SAVED_STEP)),
            load_arguments=("--output", CHECKPOINT_FOLDER, "--resume"),
            rewind=remove_last_of_trainer,
        ),
        features=frozenset({"ddp"}),
        packages=("transformers", "accelerate"),
    ),
    Job(
        entry="Accelerate",
        command=script(
            HERE / "accelerate_loop.py",
            *STEPS_FLAG,
            *LOG_FLAG,
            preload=("torch", "accelerate"),
        ),
        groups=TWO_LEVELS,
        checkpoints=Checkpoints(
            save_arguments=("--save", CHECKPOINT_FOLDER, "--save-after", str(SAVED_STEP)),
            # The script takes the number of steps to skip from --save-after.
            load_arguments=("--load", CHECKPOINT_FOLDER, "--save-after", str(SAVED_STEP)),
        ),
        shell=ACCELERATE_LAUNCH,
        features=frozenset({"ddp"}),
        packages=("accelerate",),
    ),
    Job(
        entry="Lightning",
        command=script(
            EXAMPLES / "lightning" / "train.py",
            *TWO_LAYERS,
            *STEPS_FLAG,
            *LOG_FLAG,
            preload=(*TRAINER_MODULES, "lightning"),
        ),
        groups=TWO_LEVELS,
        checkpoints=Checkpoints(
            save_arguments=("--output", CHECKPOINT_FOLDER, "--save-steps", str(SAVED_STEP)),
            load_arguments=("--output", CHECKPOINT_FOLDER, "--resume"),
            # Lightning resumes in an epoch without skipping the batches it has trained on.
            resumes_exactly=False,
        ),
        features=frozenset({"ddp", "lightning-ranks"}),
        packages=("lightning", "transformers"),
    ),
)

# DeepSpeed.

DEEPSPEED_MODULES = ("torch", "deepspeed")


def rewind_deepspeed(checkpoint_folder: Path) -> None:
    """Make the checkpoint of SAVED_STEP the one that DeepSpeed loads by default."""
    (checkpoint_folder / "latest").write_text(f"step{SAVED_STEP}")


def zero_job(stage: int) -> Job:
    """Return the job of one ZeRO stage. In stage 3 holmes leaves DeepSpeed's collectives alone."""
    has_two_levels = stage < 3
    return Job(
        entry="DeepSpeed's ZeRO 0 to 3",
        variant=f"ZeRO {stage}",
        command=script(
            ROOT / "integration_tests" / "gpu" / "zero.py",
            *("--stage", str(stage)),
            *STEPS_FLAG,
            preload=DEEPSPEED_MODULES,
            read=commands._printed,
        ),
        groups=TWO_LEVELS if has_two_levels else WORLD,
        checkpoints=SAVE_AFTER,
        reports_reductions=has_two_levels,
        features=frozenset({"two-level", "telemetry-deepspeed"}),
        packages=("deepspeed",),
    )


DEEPSPEED_JOBS = (
    Job(
        entry="DeepSpeed's pipeline engine",
        command=script(
            EXAMPLES / "deepspeed_pipeline" / "train.py",
            *SIZE,
            *STEPS_FLAG,
            *("--stages", "2"),
            *("--log", LOG),
            preload=DEEPSPEED_MODULES,
        ),
        groups=STAGE_A_CLUSTER,
        checkpoints=Checkpoints(
            save_arguments=("--save", CHECKPOINT_FOLDER, "--save-every", str(SAVED_STEP)),
            load_arguments=("--load", CHECKPOINT_FOLDER),
            rewind=rewind_deepspeed,
        ),
        holmes_arguments=("--holmes", "--holmes-sizes", "pipeline=2"),
        features=frozenset({"deepspeed-p2p", "deepspeed-edges", "overlap", "telemetry-deepspeed"}),
        pipeline_stages=2,
        tolerance=EXACT,
        packages=("deepspeed",),
    ),
    *(zero_job(stage) for stage in range(4)),
)

# Megatron.

#: Arguments of Megatron-LM and Megatron-DeepSpeed. Of a flag that is given twice, the last counts.
MEGATRON_STEPS = ("--train-iters", str(STEPS))
MEGATRON_SAVE = ("--save", CHECKPOINT_FOLDER, "--save-interval", str(SAVED_STEP))


def rewind_megatron_core_example(checkpoint_folder: Path) -> None:
    """Make the checkpoint of SAVED_STEP the one that examples/megatron_core resumes from."""
    file = checkpoint_folder / "latest.json"
    latest = json.loads(file.read_text())
    latest["step"] = SAVED_STEP
    file.write_text(json.dumps(latest))


def rewind_megatron(checkpoint_folder: Path) -> None:
    """Make the checkpoint of SAVED_STEP the newest one, in the files of Megatron and of DeepSpeed."""
    (checkpoint_folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED_STEP))
    deepspeed_file = checkpoint_folder / "latest"
    if deepspeed_file.exists():
        deepspeed_file.write_text(f"global_step{SAVED_STEP}")


def losses_of_megatron_lm(printed: list[float]) -> list[float]:
    """Return the losses of the two steps after a resume.

    Megatron-LM prints the mean loss since its last report, but after the first report of a resumed
    job it does not reset that mean (without holmes, too): the second number is the mean of both steps.
    """
    first, mean_of_both = printed
    return [first, 2 * mean_of_both - first]


def megatron_core_job(program: Path, variant: str, **fields) -> Job:
    """Return a job of examples/megatron_core.

    Args:
        program: The example, or a program that calls the example.
        variant: How holmes is switched on.
        fields: More fields of the Job.
    """
    arguments = (*MEGATRON, "--pipeline", "2", "--micro-batches", "4", *STEPS_FLAG, "--log", LOG)
    return Job(
        entry="megatron-core",
        variant=variant,
        command=script(
            program, *arguments, preload=PRELOAD_MEGATRON, env={"PYTHONPATH": python_path(ON_CPU)}
        ),
        groups=STAGE_A_CLUSTER,
        checkpoints=Checkpoints(
            save_arguments=("--save", CHECKPOINT_FOLDER, "--save-every", str(SAVED_STEP)),
            load_arguments=("--load", CHECKPOINT_FOLDER),
            rewind=rewind_megatron_core_example,
        ),
        pipeline_stages=2,
        tolerance=EXACT,
        packages=("megatron.core",),
        **fields,
    )


def with_arguments(command: Command, *arguments: str) -> Command:
    """Return the command with arguments added at its end."""
    return replace(command, words=(*command.words, *arguments))


def megatron_lm(folder: Path) -> Command:
    """Return the command of pretrain_gpt.py in Megatron-LM, without the distributed optimizer.

    Megatron-LM does not load checkpoints of the distributed optimizer on CPUs.
    """
    command = commands.megatron_lm(folder, find_checkout("Megatron-LM"))
    words = tuple(word for word in command.words if word != "--use-distributed-optimizer")
    return with_arguments(replace(command, words=words), *MEGATRON_STEPS)


def megatron_deepspeed(folder: Path) -> Command:
    """Return the command of pretrain_gpt.py in Megatron-DeepSpeed, with ZeRO 1."""
    checkout = find_checkout("Megatron-DeepSpeed")
    command = commands.megatron_deepspeed(folder, checkout, 1)
    return with_arguments(command, *MEGATRON_STEPS)


MEGATRON_JOBS = (
    megatron_core_job(
        EXAMPLES / "megatron_core" / "train.py",
        variant="--holmes",
        reports_reductions=False,  # the flag does not give the number of stages
    ),
    megatron_core_job(
        HERE / "megatron_core_call.py",
        variant="initialize_model_parallel",
        holmes_arguments=("--call-holmes",),
    ),
    Job(
        entry="Megatron-LM's pretrain_gpt.py",
        command=megatron_lm,
        groups=STAGE_A_CLUSTER,
        checkpoints=Checkpoints(
            save_arguments=MEGATRON_SAVE,
            load_arguments=("--load", CHECKPOINT_FOLDER, "--exit-on-missing-checkpoint"),
            rewind=rewind_megatron,
            losses_by_step=losses_of_megatron_lm,
        ),
        pipeline_stages=2,
        packages=("pybind11",),
        checkout="Megatron-LM",
    ),
    Job(
        entry="Megatron-DeepSpeed's pretrain_gpt.py",
        command=megatron_deepspeed,
        groups=STAGE_A_CLUSTER,
        checkpoints=Checkpoints(
            save_arguments=MEGATRON_SAVE,
            load_arguments=("--load", CHECKPOINT_FOLDER),
            rewind=rewind_megatron,
        ),
        # Stock needs stand-ins for what current packages no longer have; holmes brings its own.
        holmes_env={"STAND_INS": ""},
        features=frozenset({"deepspeed-edges", "overlap"}),
        pipeline_stages=2,
        packages=("deepspeed", "pybind11", "regex", "six", "transformers"),
        checkout="Megatron-DeepSpeed",
    ),
)

# torchtitan.


def torchtitan(folder: Path) -> Command:
    """Return the command of torchtitan with HSDP on four ranks, which may save checkpoints."""
    command = commands.torchtitan(folder, "HSDP", 4)
    words = [word for word in command.words if word != "--checkpoint.load_only"]
    return replace(command, words=(*words, "--training.steps", str(STEPS)))


TORCHTITAN_JOBS = (
    Job(
        entry="torchtitan",
        command=torchtitan,
        groups=TWO_LEVELS,
        checkpoints=Checkpoints(
            save_arguments=(
                *("--checkpoint.interval", str(SAVED_STEP)),
                *("--checkpoint.folder", CHECKPOINT_FOLDER),
            ),
            load_arguments=(
                *("--checkpoint.load_step", str(SAVED_STEP)),
                *("--checkpoint.folder", CHECKPOINT_FOLDER),
            ),
        ),
        features=frozenset({"fsdp"}),
        reports_reductions=False,
        packages=("tokenizers",),
        installed_in=TORCHTITAN_FOLDER,
    ),
)

JOBS = (*TORCH_JOBS, *TRAINER_JOBS, *DEEPSPEED_JOBS, *MEGATRON_JOBS, *TORCHTITAN_JOBS)
