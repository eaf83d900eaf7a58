"""Test cases that run the Slurm and MPI scripts which users copy from examples/slurm and examples/mpi.

The scripts run unmodified on emulated nodes, except for two changes that make them small:

    nodes     two nodes of one process, instead of 12 nodes of 8 processes
    models    sizes that train in seconds on a CPU

Each script is started as an ordinary job and as a heterogeneous Slurm job. Its losses must equal those of
torchrun without holmes. If transformers or a checkout of Megatron-LM (tests/checkouts.py) is missing, the
script for it trains a model of plain torch instead.

One more case keeps the 12 nodes of 8 processes. There the training command is replaced by a program that
prints only its node and its arguments.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from holmes_ext.cluster.sources.hostlist import expand
from integration_tests.jobs import ROOT
from integration_tests.launchers.bench import PAIR, Bench
from integration_tests.launchers.cases import agents, case, hostfile
from integration_tests.megatron.test_megatron_lm import FLAGS, MEGATRON, variables_in

EXAMPLES = ROOT / "examples"
SMALL = (
    "--steps",
    "3",
    "--layers",
    "2",
    "--hidden",
    "32",
    "--sequence",
    "16",
    "--micro-batches",
    "2",
)
PLAIN = str(EXAMPLES / "plain_torch" / "train.py")
#: Options in the scripts of examples/slurm -> options of the tests, for two nodes of one process.
SIZES = {
    '--nodes=12 --ntasks-per-node=8 --gpus-per-node=8 --constraint="[ib*6&roce*6]"': (
        '--nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --constraint="[ib*1&roce*1]"'
    ),
    **{
        f"--nodes=6 --ntasks-per-node=8 --gpus-per-node=8 --constraint={kind}": (
            f"--nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --constraint={kind}"
        )
        for kind in ("ib", "roce")
    },
}


@dataclass(frozen=True)
class Example:
    """A training script of one framework, as the scripts in examples/slurm start it."""

    script: str  # path of the training script
    arguments: tuple[str, ...] = SMALL
    #: Arguments that only a start by torchrun needs, since the batch scripts have them.
    stock: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)  # environment variables of the job


def try_slurm(folder: Path, name: str, example: Example) -> None:
    """Submit both batch scripts of an example, and compare the losses with those of torchrun.

    Args:
        name: Name of the scripts in examples/slurm: NAME.sbatch and NAME_het.sbatch.
    """
    with Bench(folder, ("slurm",), order=PAIR) as bench:
        bench.script = [example.script, *example.stock, *example.arguments]
        expected = losses_of("\n".join(agents(bench, env=example.variables)), bench)
        for file in (f"{name}.sbatch", f"{name}_het.sbatch"):
            text = submitted(bench, file, example)
            line = "holmes: 2 clusters: a (1 node, ib) -> b (1 node, roce); world size 2"
            assert line in text, text[-4000:]
            # Last lines of `holmes doctor` and `holmes report`.
            assert "0 problems" in text and "\nslowest: rank" in text, text[-4000:]
            assert_same(losses_of(text, bench), expected)


def submitted(bench: Bench, file: str, example: Example) -> str:
    """Submit a batch script of examples/slurm as a small job, and return its output."""
    text = (EXAMPLES / "slurm" / file).read_text()
    for large, small in SIZES.items():
        text = text.replace(large, small)
    assert "=8" not in "".join(line for line in text.splitlines() if line.startswith("#SBATCH"))
    script = bench.folder / file
    script.write_text(text)
    output = bench.folder / f"{file}.log"
    variables = {
        "CLUSTER": str(bench.file),
        "TRAIN": example.script,
        "MEGATRON": str(Path(example.script).parent),
        "SAVE": f"{bench.folder}/{file}.checkpoints",
        **example.variables,
    }
    try:
        bench.run(
            "env",
            *(f"{name}={value}" for name, value in variables.items()),
            "sbatch",
            "--wait",
            f"--chdir={bench.folder}",
            f"--output={output}",
            str(script),
            *example.arguments,
            timeout=600,
        )
    except AssertionError as error:
        message = output.read_text()[-6000:] if output.exists() else error
        raise AssertionError(message) from None
    return output.read_text()


def losses_of(text: str, bench: Bench) -> list[float]:
    """Return each step's loss from the log file, which is then removed, or from Megatron's output."""
    log = bench.folder / "steps.json"
    if not log.exists():
        return [float(loss) for loss in re.findall(r"lm loss: (\S+)", text)]
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    log.unlink()
    return losses


def assert_same(losses: list[float], expected: list[float]) -> None:
    assert len(losses) == len(expected) >= 3, (losses, expected)
    assert max(abs(a - b) for a, b in zip(losses, expected)) < 1e-5, (losses, expected)


@case
def example_trainer(folder):
    script = str(EXAMPLES / "trainer" / "train.py") if find_spec("transformers") else PLAIN
    try_slurm(folder, "trainer", Example(script, (*SMALL, "--log-file", f"{folder}/steps.json")))


@case
def example_deepspeed(folder):
    arguments = (*SMALL, "--log-file", f"{folder}/steps.json")
    script = str(EXAMPLES / "deepspeed_pipeline" / "train.py")
    try_slurm(folder, "deepspeed", Example(script, arguments, stock=("--stages", "2")))


@case
def example_megatron_lm(folder):
    """Train Megatron-LM from a checkout, or a stand-in that takes the same arguments."""
    if MEGATRON:
        arguments = (*FLAGS, "--tensor-model-parallel-size", "1", "--lr-warmup-fraction", "0")
        try_slurm(
            folder,
            "megatron_lm",
            Example(f"{MEGATRON}/pretrain_gpt.py", arguments, ("--bf16",), variables_in(folder)),
        )
        return
    script = folder / "pretrain_gpt.py"
    script.write_text(STAND_IN.format(plain=PLAIN, log=folder / "steps.json", small=SMALL))
    try_slurm(
        folder,
        "megatron_lm",
        Example(
            str(script),
            ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"),
        ),
    )


#: A pretrain_gpt.py that reads no flag of Megatron's and trains the plain example.
STAND_IN = """
import runpy, sys
sys.argv[1:] = [*{small!r}, "--log-file", "{log}"]
runpy.run_path("{plain}", run_name="__main__")
"""


@case
def example_sizes(folder):
    """Start the scripts unchanged on 12 nodes of 8 GPUs.

    They must start one torchrun a node, or one python a GPU, in one job or in two components.
    """
    text = (EXAMPLES / "clusters" / "slurm_8_ib_6_roce.toml").read_text().replace("Gb/s", "0Mb/s")
    hosts = expand("gpu[01-06,11-16]", "here")
    programs = folder / "bin"
    calls = folder / "told"  # a file for each call of a program
    programs.mkdir()
    for name in ("torchrun", "python", "holmes"):
        (programs / name).write_text(
            f'#!/bin/sh\necho "$(hostname) $*" >$(mktemp "{calls}/{name}.XXXXXX")\n'
        )
        (programs / name).chmod(0o755)
    every = tuple(expand("gpu[01-08,11-16]", "here"))
    agent = "--nnodes=12 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=gpu01:"
    with Bench(folder, ("slurm",), processes=8, order=every, toml=text) as bench:
        for script in sorted((EXAMPLES / "slurm").glob("*.sbatch")):
            calls.mkdir()
            bench.run(
                "env",
                f"PATH={programs}:{os.environ['PATH']}",
                "sbatch",
                "--wait",
                f"--output={folder}/{script.name}.log",
                str(script),
                cwd=folder,
            )
            lines = sorted(file.read_text() for file in calls.glob("torchrun.*"))
            if lines:
                calls_per_host = 1
                assert all(agent in line for line in lines), script
            else:
                calls_per_host = 8
                lines = sorted(file.read_text() for file in calls.glob("python.*"))
            assert [line.split()[0] for line in lines] == sorted(hosts * calls_per_host), script
            shutil.rmtree(calls)


@case
def example_mpi(folder):
    with Bench(folder, ("ssh",), order=PAIR) as bench:
        arguments = (*SMALL, "--log-file", f"{folder}/steps.json")
        bench.script = [PLAIN, *arguments]
        expected = losses_of("\n".join(agents(bench)), bench)
        variables = {
            "HOSTFILE": hostfile(bench),
            "CLUSTER": str(bench.file),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        text = bench.run(
            "env",
            *(f"{name}={value}" for name, value in variables.items()),
            str(EXAMPLES / "mpi" / "run.sh"),
            sys.executable,
            *bench.script,
            cwd=folder,
        )
        assert "holmes: 2 clusters" in text and "\nslowest: rank" in text, text[-4000:]
        assert_same(losses_of(text, bench), expected)
