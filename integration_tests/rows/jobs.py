"""Lists the training jobs that the tests run with and without holmes, this repository's torch plugin.

run.md's table "your job" names the launchers and frameworks that holmes supports, and says what to add
to a job's command, usually the flag `--holmes`. JOBS has at least one job for each of them.

Every job runs on two clusters of nodes, one with InfiniBand and one with RoCE, joined by Ethernet.
holmes recognizes the two clusters by their NICs. Therefore the jobs need no file that describes them.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from carriers import ON_GPUS
from checkouts import find_checkout
from holmes_lab.process.job import RunResult

from integration_tests.gpu import commands
from integration_tests.gpu.commands import LOG, Command
from integration_tests.jobs import FULL, MEGATRON, ON_CPU, PRELOAD_MEGATRON, ROOT, SIZE, losses
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
FOUR_LAYERS = (
    "--layers 4 --hidden 64 --heads 4 --sequence 16 --micro-batch 2 --micro-batches 4".split()
)
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
#: The groups of a hierarchical all-reduce: inside each cluster, and across both.
HIERARCHICAL = DATA_INSIDE_CLUSTERS | {Group(kind="data", where="across", fabric="ethernet")}
#: One group of all ranks: holmes does not split the collectives of the job into levels.
WORLD = frozenset({Group(kind="world", where="across", fabric="ethernet")})
#: A pipeline stage in each cluster: gradients stay inside, activations cross.
STAGE_A_CLUSTER = DATA_INSIDE_CLUSTERS | {Group(kind="pipeline", where="across", fabric="ethernet")}

#: Checkpoints of a script with --save, --save-after and --load.
SAVE_AFTER = Checkpoints(
    save_arguments=("--save", CHECKPOINT_FOLDER, "--save-after", str(SAVED_STEP)),
    load_arguments=("--load", CHECKPOINT_FOLDER),
)
#: holmes shards FSDP weights inside each cluster and replicates them across the clusters.
HYBRID_FSDP = ("--holmes", "--holmes-fsdp", "hybrid")


def read_log(result: RunResult, log: Path) -> list[float]:
    """Return the loss of each step from the script's log, a file of JSON lines."""
    return losses(log)


def script(
    path: Path,
    *arguments: str,
    preload: tuple[str, ...] = ("torch",),
    read: Callable[[RunResult, Path], list[float]] = read_log,
    env: Mapping[str, str] = NO_VARIABLES,
) -> Callable[[Path], Command]:
    """Return a function that makes the command of a Python script, for use as `Job.command`.

    The function receives a folder. Commands of other jobs need files, which such a function writes there.

    Args:
        path: The script.
        arguments: Arguments of the script.
        preload: Modules that are imported once, before a process is forked for each rank.
        read: Returns the loss of each step, from the output of the run or from the script's log.
        env: Environment variables of the script.
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
    """Return a job that tests how the processes of a script start, for example by a launcher.

    The script trains in a plain loop with an all-reduce over all ranks, which holmes does not change.

    Args:
        entry: What starts the processes, as run.md's table of supported jobs calls it ("srun").
        fields: More fields of the Job, such as the launcher.
    """
    return Job(
        entry=entry,
        command=train_script(),
        groups=WORLD,  # the script uses one process group of all ranks
        checkpoints=None,  # they do not depend on how processes start; other jobs test them
        reports_reductions=False,  # holmes reports only reductions that it makes itself
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
    loop_job(
        "a Python that ignores .pth files",
        holmes_arguments=(),
        shell=PYTHON_WITHOUT_PTH,
        runs_on_emulated_gpus=False,
    ),
    Job(
        entry="DDP",
        command=train_script("--way", "ddp"),
        groups=HIERARCHICAL,
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
        groups=HIERARCHICAL,
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
        groups=HIERARCHICAL,
        checkpoints=SAVE_AFTER,
        features=frozenset({"fsdp"}),
        reports_reductions=False,
    ),
    Job(
        entry="FSDP1",
        command=train_script("--way", "fsdp1"),
        groups=HIERARCHICAL,
        checkpoints=SAVE_AFTER,
        holmes_arguments=HYBRID_FSDP,
        features=frozenset({"fsdp"}),
        reports_reductions=False,
    ),
    Job(
        entry="a plain torch loop",
        command=train_script("--way", "loop"),
        groups=HIERARCHICAL,
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
    """Remove the checkpoint that Hugging Face's Trainer saves after its last step.

    The flag --resume takes the newest checkpoint, which is then the one that was saved after SAVED_STEP.
    """
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
        groups=HIERARCHICAL,
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
        groups=HIERARCHICAL,
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
        groups=HIERARCHICAL,
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
    """Make DeepSpeed load the checkpoint that was saved after SAVED_STEP, instead of the newest one.

    By default, DeepSpeed loads the checkpoint that the file `latest` names.
    """
    (checkpoint_folder / "latest").write_text(f"step{SAVED_STEP}")


def zero_job(stage: int) -> Job:
    """Return a job that trains with DeepSpeed in this stage of ZeRO.

    In stages 0 to 2, holmes reduces gradients hierarchically: inside each cluster, then across the
    clusters. In stage 3, it leaves DeepSpeed's collectives as they are.
    """
    has_hierarchical = stage < 3
    return Job(
        entry="DeepSpeed's ZeRO 0 to 3",  # of run.md's table of supported jobs
        variant=f"ZeRO {stage}",
        command=script(
            ROOT / "integration_tests" / "gpu" / "zero.py",
            *("--stage", str(stage)),
            *STEPS_FLAG,
            preload=DEEPSPEED_MODULES,
            read=commands._printed_losses,
        ),
        groups=HIERARCHICAL if has_hierarchical else WORLD,  # that `holmes report` must list
        checkpoints=SAVE_AFTER if stage in (1, 3) or FULL else None,
        reports_reductions=has_hierarchical,  # holmes reports only reductions that it makes itself
        features=frozenset({"hierarchical", "telemetry-deepspeed"}),  # which must be active
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
        features=frozenset(
            {"deepspeed-p2p", "deepspeed-stage-links", "overlap", "telemetry-deepspeed"}
        ),
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
    """Make examples/megatron_core resume from the checkpoint of SAVED_STEP, not from the newest one.

    The example resumes from the step that the file latest.json names.
    """
    file = checkpoint_folder / "latest.json"
    latest = json.loads(file.read_text())
    latest["step"] = SAVED_STEP
    file.write_text(json.dumps(latest))


def rewind_megatron(checkpoint_folder: Path) -> None:
    """Make Megatron-LM or Megatron-DeepSpeed load the checkpoint of SAVED_STEP, not the newest one.

    Megatron-LM reads the step from latest_checkpointed_iteration.txt. Megatron-DeepSpeed also reads
    DeepSpeed's file `latest`.
    """
    (checkpoint_folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED_STEP))
    deepspeed_file = checkpoint_folder / "latest"
    if deepspeed_file.exists():
        deepspeed_file.write_text(f"global_step{SAVED_STEP}")


def losses_of_megatron_lm(printed: list[float]) -> list[float]:
    """Return the losses of the two steps of a resumed job, given the two numbers that it prints.

    The first number is the loss of the first step. The second number is the mean of both losses:
    Megatron-LM, with and without holmes, does not reset its running mean after a resumed job's first
    step.
    """
    first, mean_of_both = printed
    return [first, 2 * mean_of_both - first]


CHECKPOINTS_OF_MEGATRON_CORE = Checkpoints(
    save_arguments=("--save", CHECKPOINT_FOLDER, "--save-every", str(SAVED_STEP)),
    load_arguments=("--load", CHECKPOINT_FOLDER),
    rewind=rewind_megatron_core_example,
)


def megatron_core_job(program: Path, variant: str, **fields) -> Job:
    """Return a job that trains a GPT with megatron-core in two pipeline stages, one in each cluster.

    Args:
        program: The script examples/megatron_core/train.py, or a script that calls it.
        variant: How the job switches holmes on; distinguishes the jobs of megatron-core.
        fields: More fields of the Job.
    """
    model = MEGATRON  # flags of a small GPT
    arguments = (*model, "--pipeline", "2", "--micro-batches", "4", *STEPS_FLAG, "--log", LOG)
    path_of_cpu_stand_ins = python_path(ON_CPU)  # megatron-core itself does not run without CUDA
    return Job(
        entry="megatron-core",
        variant=variant,
        command=script(
            program,
            *arguments,
            preload=PRELOAD_MEGATRON,
            env={"PYTHONPATH": path_of_cpu_stand_ins},
        ),
        groups=STAGE_A_CLUSTER,  # process groups that `holmes report` must list
        checkpoints=CHECKPOINTS_OF_MEGATRON_CORE if variant == "--holmes" or FULL else None,
        pipeline_stages=2,
        tolerance=EXACT,  # the losses must equal those without holmes bit by bit
        packages=("megatron.core",),
        **fields,
    )


def with_arguments(command: Command, *arguments: str) -> Command:
    """Return a copy of the command with arguments added at its end."""
    return replace(command, words=(*command.words, *arguments))


def megatron_lm(folder: Path) -> Command:
    """Return the command of Megatron-LM's pretrain_gpt.py, on CPUs without its distributed optimizer.

    On CPUs, Megatron-LM cannot load a checkpoint that the distributed optimizer saved. On GPUs it
    needs the distributed optimizer here: without it, --use-cpu-initialization leaves the position
    embedding on the CPU.
    """
    command = commands.megatron_lm(folder, find_checkout("Megatron-LM"))
    if not ON_GPUS:
        words = tuple(word for word in command.words if word != "--use-distributed-optimizer")
        command = replace(command, words=words, preload=("megatron.training.training",))
    return with_arguments(command, *MEGATRON_STEPS)


def megatron_deepspeed(folder: Path) -> Command:
    """Return the command of Megatron-DeepSpeed's pretrain_gpt.py, with ZeRO stage 1."""
    checkout = find_checkout("Megatron-DeepSpeed")
    command = commands.megatron_deepspeed(folder, checkout, zero=1)
    return with_arguments(command, *MEGATRON_STEPS)


#: On emulated GPUs, the lab sets NCCL_IB_DISABLE=1 if it finds no --holmes in a command. A job's own value
#: stays.
WITH_INFINIBAND = {"NCCL_IB_DISABLE": "0"} if ON_GPUS else {}

#: Not for GPUs: there, Megatron-LM needs its distributed optimizer, whose checkpoints it can resume only with
#: Apex or Transformer Engine.
CHECKPOINTS_OF_MEGATRON_LM = Checkpoints(
    save_arguments=MEGATRON_SAVE,
    load_arguments=("--load", CHECKPOINT_FOLDER, "--exit-on-missing-checkpoint"),
    rewind=rewind_megatron,
    losses_by_step=losses_of_megatron_lm,
)

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
        holmes_env=WITH_INFINIBAND,
    ),
    Job(
        entry="Megatron-LM's pretrain_gpt.py",
        command=megatron_lm,
        groups=STAGE_A_CLUSTER,
        checkpoints=None if ON_GPUS else CHECKPOINTS_OF_MEGATRON_LM,
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
        features=frozenset({"deepspeed-stage-links", "overlap"}),
        pipeline_stages=2,
        packages=("deepspeed", "pybind11", "regex", "six", "transformers"),
        checkout="Megatron-DeepSpeed",
    ),
)

# torchtitan.


def torchtitan(folder: Path) -> Command:
    """Return the command of a torchtitan job that trains with HSDP on four ranks.

    The flag that forbids the job to save checkpoints, --checkpoint.load_only, is removed.
    """
    command = commands.torchtitan(folder, "HSDP", ranks=4)
    words = [word for word in command.words if word != "--checkpoint.load_only"]
    # torchtitan itself is not preloaded: it imports pyarrow, which starts a thread.
    preload = () if ON_GPUS else ("torch",)
    return replace(command, words=(*words, "--training.steps", str(STEPS)), preload=preload)


TORCHTITAN_JOBS = (
    Job(
        entry="torchtitan",
        command=torchtitan,
        groups=HIERARCHICAL,
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
