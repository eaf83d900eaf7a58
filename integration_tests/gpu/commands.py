"""Training commands as users type them, for tests that compare losses on emulated GPUs with losses on CPUs.

The same command runs unchanged on emulated GPUs with NCCL and on CPUs with gloo. Its framework must be there:

    Megatron-LM, Megatron-DeepSpeed    checkouts of the repositories, which tests/checkouts.py finds
    torchtitan                         in build/torchtitan, where `make torchtitan` installs it

Megatron-LM and torchtitan need small adaptations to train on CPUs (examples/megatron_core/on_cpu,
integration_tests/torchtitan_cpu). Only the runs on CPUs load these.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from carriers import LESS_MEMORY, ON_GPUS, PHYSICAL
from checkouts import find_checkout
from holmes_lab import Lab
from holmes_lab.gpu.job import Gpus
from holmes_lab.process.job import RunResult

from integration_tests.jobs import ROOT, SIZE
from integration_tests.jobs import losses as losses_of_file
from integration_tests.megatron_deepspeed.job import PRELOADED, Checkout, read_log
from integration_tests.stacks.torchtitan_job import INSTALLED, WAYS, job_arguments, write_job

HERE = ROOT / "integration_tests" / "gpu"
EXAMPLES = ROOT / "examples"
#: Stands in Command.words for the path of the file into which the command writes its losses.
LOG = "LOG"
ON_GPU = {"DS_ACCELERATOR": "cuda", "DS_BUILD_OPS": "0", **LESS_MEMORY}
ON_CPU = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0"}
TIMEOUT_S = 900
#: Number of processes of a node. A physical GPU is the only one of its machine.
PROCESSES = 1 if PHYSICAL else 2
#: Arguments of GpuLab.run() for a job of four ranks.
FOUR_RANKS = {"order": "a0,a1,b0,b1" if PHYSICAL else "a0,b0", "processes": PROCESSES}


@dataclass(frozen=True)
class Command:
    """A training command that runs unchanged on emulated GPUs and on CPUs."""

    name: str
    words: tuple[str, ...]  # behind `python`; LOG stands for the path of the log
    folder: Path  # of the logs
    preload: tuple[str, ...]  # modules that are imported before a process is forked for each rank
    #: Returns the losses, given the result of the run and the path of its log.
    read: Callable[[RunResult, Path], list[float]]
    env: Mapping[str, str] = field(default_factory=dict)
    on_cpu: tuple[str, ...] = ()  # further words on CPUs
    env_on_cpu: Mapping[str, str] = field(default_factory=dict)  # further variables on CPUs
    inside: Path | None = None  # working directory

    def losses(self, lab: Lab, nodes: str, gpus: Gpus | None) -> list[float]:
        """Run the command on these nodes, and return the loss of each step.

        Each node has two processes, or one if there is a single physical GPU.

        Args:
            gpus: Emulated GPUs; None: the command runs on CPUs.

        Raises:
            AssertionError: With the output of the first rank that failed.
        """
        file_name = re.sub("[^a-z0-9]+", "-", self.name.lower())
        log = self.folder / f"{file_name}-{'gpu' if gpus else 'cpu'}.jsonl"
        words = [str(log) if word == LOG else word for word in self.words]
        env = {"PYTEST_CURRENT_TEST": "", **self.env}
        if gpus:
            env.update(ON_GPU)
        else:
            env.update({**ON_CPU, **self.env_on_cpu})
            words += self.on_cpu
        result = lab.run(
            [sys.executable, *words],
            order=nodes.split(","),
            processes=PROCESSES,
            preload=() if PHYSICAL else self.preload,
            env=env,
            gpus=gpus,
            timeout=TIMEOUT_S,
            cwd=self.inside,
        )
        assert result.returncode == 0, result.outputs[result.first_failed or 0][-5000:]
        return self.read(result, log)


def _printed_losses(result: RunResult, log: Path) -> list[float]:
    last_line = result.stdout[0].strip().splitlines()[-1]
    return json.loads(last_line)["losses"]


def _logged_losses(result: RunResult, log: Path) -> list[float]:
    return losses_of_file(log)


def _megatron_losses(result: RunResult, log: Path) -> list[float]:
    output = "\n".join(result.outputs.values())
    matches = re.findall(r"iteration\s+(\d+)/.*?lm loss: (\S+) ", output)
    loss_of = {int(iteration): float(loss) for iteration, loss in matches}
    return [loss_of[iteration] for iteration in sorted(loss_of)]


def deepspeed(folder: Path) -> list[Command]:
    """Return the commands for DeepSpeed's ZeRO 0 to 3, and for its pipeline engine."""
    preload = ("torch", "deepspeed")
    zero = [
        Command(
            name=f"DeepSpeed, ZeRO {stage}",
            words=(str(HERE / "zero.py"), "--stage", str(stage)),
            folder=folder,
            preload=preload,
            read=_printed_losses,
        )
        for stage in range(4)
    ]
    script = str(EXAMPLES / "deepspeed_pipeline" / "train.py")
    pipeline = Command(
        name="DeepSpeed, pipeline 2",
        words=(script, *SIZE, "--stages", "2", "--log", LOG),
        folder=folder,
        preload=preload,
        read=_logged_losses,
    )
    return [*zero, pipeline]


def trainer(folder: Path) -> Command:
    model = (
        "--layers 2 --hidden 64 --sequence 16 --micro-batch 2 --micro-batches 2 --steps 4".split()
    )
    words = (
        str(EXAMPLES / "trainer" / "train.py"),
        *model,
        "--output",
        str(folder / "out"),
        "--log-file",
        LOG,
    )
    return Command(
        name="transformers' Trainer",
        words=words,
        folder=folder,
        preload=("torch", "transformers.trainer"),
        read=_logged_losses,
    )


MEGATRON = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 16 --train-iters 4 --lr 1e-3 --min-lr 1e-4
    --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 255
    --eval-iters 0 --eval-interval 1000 --log-interval 1
    --num-workers 0 --split 100,0,0 --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer
    --transformer-impl local --no-rope-fusion --no-persist-layer-norm --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion
""".split()
PIPELINE = ("--pipeline-model-parallel-size", "2")
TENSOR = ("--tensor-model-parallel-size", "2")


def megatron_lm(folder: Path, checkout: Path, *flags: str) -> Command:
    """Return the command of Megatron-LM with the distributed optimizer.

    It writes tools into the folder with which Megatron-LM's Makefile finds this Python.
    """
    from megatron_cpu_shim import write_sitecustomize

    tools = folder / "bin"
    site = folder / "on_cpu"
    tools.mkdir()
    site.mkdir()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name, line in (
        ("python3", f'exec {sys.executable} "$@"'),
        ("python3-config", f"echo {suffix}"),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    # Megatron-LM imports typing.override, which Python has since 3.12.
    override = "import typing\nvars(typing).setdefault('override', lambda made: made)\n"
    (folder / "sitecustomize.py").write_text(override)
    env = {
        **_path(folder, checkout),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "TORCHDYNAMO_DISABLE": "1",
    }
    return Command(
        name=f"Megatron-LM, {_sizes(flags)}",
        words=(str(checkout / "pretrain_gpt.py"), *MEGATRON, *PIPELINE, *flags),
        folder=folder,
        preload=("torch",),
        read=_megatron_losses,
        env=env,
        on_cpu=("--distributed-backend", "gloo"),
        env_on_cpu=_path(write_sitecustomize(site), checkout),
    )


def _sizes(flags: Sequence[str]) -> str:
    if "--tensor-model-parallel-size" in flags:
        return "tensor 2, pipeline 2, data 2"
    return "pipeline 2, data 2"


def _path(*folders: str | Path) -> dict[str, str]:
    entries = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, entries))}


#: Stand-ins for the parts of Apex and nvcc that Megatron-DeepSpeed needs if there is CUDA: file -> text. They
#: use torch's own functions, since Apex's kernels are not emulated.
APEX_OF_TORCH = {
    "apex/__init__.py": "",
    "amp_C.py": "",
    "fused_layer_norm_cuda.py": "",
    "apex/multi_tensor_apply.py": "multi_tensor_applier = None\n",
    "apex/optimizers.py": "from torch.optim import Adam as FusedAdam, SGD as FusedSGD\n",
    "apex/normalization/__init__.py": "from torch.nn import RMSNorm as MixedFusedRMSNorm\n",
    "apex/normalization/fused_layer_norm.py": """from torch.nn.functional import layer_norm
class FusedLayerNormAffineFunction:
    @staticmethod
    def forward(input, weight, bias, shape, eps):
        return layer_norm(input, shape, weight, bias, eps)
    apply = forward
""",
    "bin/nvcc": "#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.0\n",
}


def megatron_deepspeed(
    folder: Path,
    checkout: Path,
    zero: int,
    *flags: str,
    vocabulary: tuple[Path, Path] | None = None,
) -> Command:
    """Return the command of Megatron-DeepSpeed.

    Weights are drawn on the CPU, because a GPU draws other numbers. Stand-ins replace Apex's modules by
    torch's, on GPUs and on CPUs.
    """
    copy = Checkout(checkout, folder, vocabulary)
    apex = folder / "apex_of_torch"
    for name, text in APEX_OF_TORCH.items():
        (apex / name).parent.mkdir(parents=True, exist_ok=True)
        (apex / name).write_text(text)
    (apex / "bin" / "nvcc").chmod(0o755)
    words = copy.arguments(4, *PIPELINE, "--use-cpu-initialization", *flags, zero=zero)
    words.remove("--ds_fused_adam")
    env = {
        **copy.env,
        **copy.stand_ins(words),
        "CUDA_HOME": str(apex),
        "PYTHONPATH": os.pathsep.join([str(apex), copy.env["PYTHONPATH"]]),
    }
    preload = ("torch", "deepspeed") if ON_GPUS else PRELOADED
    return Command(
        name=f"Megatron-DeepSpeed, {_sizes(flags)}, ZeRO {zero}",
        words=tuple(words),
        folder=folder,
        preload=preload,
        read=lambda result, log: list(read_log(result).losses.values()),
        env=env,
        inside=copy.folder,
    )


def torchtitan(folder: Path, way: str, ranks: int) -> Command:
    """Return the command of a torchtitan job. All runs of the job start with the same weights.

    The weights are in torchtitan's seed checkpoint, which this function makes on the CPU. The losses are read
    from TensorBoard files, because torchtitan prints only five decimals.

    Args:
        folder: An empty folder for the files of the job.
        way: How the model is divided over the ranks: a key of torchtitan_job.WAYS, such as "HSDP".
        ranks: Number of ranks of the job.
    """
    write_job(folder)  # configuration, tokenizer and training text
    # WAYS is for 4 ranks, with 2 shards of each replica or pipeline stage. Here there are ranks / 2 shards.
    flags = WAYS[way].replace("shard_degree 2", f"shard_degree {ranks // 2}")
    # The sitecustomize.py in this folder adapts torch to CPUs.
    on_cpu = str(ROOT / "integration_tests" / "torchtitan_cpu")
    variables = {"HF_HOME": str(folder / "cache"), "TORCHDYNAMO_DISABLE": "1"}
    env = {**variables, **_path(INSTALLED)}  # _path: PYTHONPATH with these folders
    env_on_cpu = _path(on_cpu, INSTALLED)
    words = ("-m", "torchtitan.train", *job_arguments("--checkpoint.enable"))

    one_rank = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29417",
    }
    seed = subprocess.run(
        [sys.executable, *words, "--checkpoint.create_seed_checkpoint"],
        cwd=folder,
        env={**os.environ, **variables, **env_on_cpu, **one_rank},
        text=True,
        capture_output=True,
    )
    assert seed.returncode == 0, seed.stderr[-3000:]

    def read(result: RunResult, log: Path) -> list[float]:
        # A separate process reads the file, because tensorboard is installed in torchtitan's folder only.
        program = (
            "import json, sys; from tensorboard.backend.event_processing.event_accumulator import *\n"
            "log = EventAccumulator(sys.argv[1]); log.Reload()\n"
            "print(json.dumps([one.value for one in log.Scalars('loss_metrics/global_avg_loss')]))"
        )
        folder_of_log = str(next(log.rglob("events.*")).parent)
        done = subprocess.run(
            [sys.executable, "-c", program, folder_of_log],
            env={**os.environ, **env},
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    # load_only: the runs load the seed checkpoint, and write none. LOG stands for a folder for the losses.
    logs = (
        "--metrics.enable_tensorboard",
        "--metrics.save_tb_folder",
        LOG,
        "--checkpoint.load_only",
    )
    return Command(
        name=f"torchtitan, {way}",
        words=(*words, *logs, *flags.split()),
        folder=folder,
        preload=(),
        read=read,
        env=env,
        env_on_cpu=env_on_cpu,
        inside=folder,
    )


def compared(folder: Path) -> Iterator[Command]:
    """Yield the training commands whose losses on 8 GPUs are compared with those on CPUs.

    A command is left out if its framework is missing: the checkout of Megatron-LM or Megatron-DeepSpeed, or
    the installed torchtitan.

    Args:
        folder: Each command writes its files into a folder inside of this one.
    """
    yield from deepspeed(folder)
    yield trainer(folder)
    # TENSOR: flags for tensor parallelism over two ranks
    if checkout := find_checkout("Megatron-LM"):
        (folder / "Megatron-LM").mkdir()
        yield megatron_lm(folder / "Megatron-LM", checkout, *TENSOR)
    if checkout := find_checkout("Megatron-DeepSpeed"):
        (folder / "Megatron-DeepSpeed").mkdir()
        zero_stage = 1
        yield megatron_deepspeed(folder / "Megatron-DeepSpeed", checkout, zero_stage, *TENSOR)
    if INSTALLED.is_dir():  # the folder of an installed torchtitan
        for way in ("HSDP", "1F1B"):  # sharded data parallelism, and a pipeline
            (folder / way).mkdir()
            yield torchtitan(folder / way, way, ranks=8)
