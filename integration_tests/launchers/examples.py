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
#: What a script says, and what it is here: two nodes of one process.
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
    """Of a framework: the script that trains, its arguments, those that only torchrun without the example's
    own ones needs, and variables of the job.
    """

    script: str
    arguments: tuple[str, ...] = SMALL
    stock: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


def try_slurm(folder: Path, name: str, example: Example) -> None:
    """name: of its two files in examples/slurm."""
    with Bench(folder, ("slurm",), order=PAIR) as bench:
        bench.script = [example.script, *example.stock, *example.arguments]
        wanted = losses_of("\n".join(agents(bench, env=example.variables)), bench)
        for file in (f"{name}.sbatch", f"{name}_het.sbatch"):
            text = submitted(bench, file, example)
            line = "holmes: 2 clusters: a (1 node, ib) -> b (1 node, roce); world size 2"
            assert line in text, text[-4000:]
            # doctor's last line, the report's
            assert "0 problems" in text and "\nslowest: rank" in text, text[-4000:]
            assert_same(losses_of(text, bench), wanted)


def submitted(bench: Bench, file: str, example: Example) -> str:
    """What a file of examples/slurm writes as a job of this lab."""
    text = (EXAMPLES / "slurm" / file).read_text()
    for there, here in SIZES.items():
        text = text.replace(there, here)
    assert "=8" not in "".join(line for line in text.splitlines() if line.startswith("#SBATCH"))
    script = bench.folder / file
    script.write_text(text)
    said = bench.folder / f"{file}.log"
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
            f"--output={said}",
            str(script),
            *example.arguments,
            timeout=600,
        )
    except AssertionError as error:
        raise AssertionError(said.read_text()[-6000:] if said.exists() else error) from None
    return said.read_text()


def losses_of(text: str, bench: Bench) -> list[float]:
    """Of each step: of the log file, which is then removed, or as Megatron prints them."""
    log = bench.folder / "steps.json"
    if not log.exists():
        return [float(loss) for loss in re.findall(r"lm loss: (\S+)", text)]
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    log.unlink()
    return losses


def assert_same(losses: list[float], wanted: list[float]) -> None:
    assert (
        len(losses) == len(wanted) >= 3 and max(abs(a - b) for a, b in zip(losses, wanted)) < 1e-5
    ), (losses, wanted)


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
    """Of the checkout, through megatron_cpu_shim.py; else what stands in its place takes the same
    arguments.
    """
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
    """On 12 nodes of 8 GPUs: one torchrun a node, or one python a GPU, of one job or of two components."""
    text = (EXAMPLES / "clusters" / "slurm_8_ib_6_roce.toml").read_text().replace("Gb/s", "0Mb/s")
    hosts = expand("gpu[01-06,11-16]", "here")
    programs, told = folder / "bin", folder / "told"
    programs.mkdir()
    for name in ("torchrun", "python", "holmes"):
        (programs / name).write_text(
            f'#!/bin/sh\necho "$(hostname) $*" >$(mktemp "{told}/{name}.XXXXXX")\n'
        )
        (programs / name).chmod(0o755)
    every = tuple(expand("gpu[01-08,11-16]", "here"))
    agent = "--nnodes=12 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=gpu01:"
    with Bench(folder, ("slurm",), processes=8, order=every, toml=text) as bench:
        for script in sorted((EXAMPLES / "slurm").glob("*.sbatch")):
            told.mkdir()
            bench.run(
                "env",
                f"PATH={programs}:{os.environ['PATH']}",
                "sbatch",
                "--wait",
                f"--output={folder}/{script.name}.log",
                str(script),
                cwd=folder,
            )
            said = {
                name: sorted(file.read_text() for file in told.glob(f"{name}.*"))
                for name in ("torchrun", "python")
            }
            launcher = "torchrun" if said["torchrun"] else "python"
            each = 1 if said["torchrun"] else 8
            assert [line.split()[0] for line in said[launcher]] == sorted(hosts * each), script
            assert each == 8 or all(agent in line for line in said[launcher]), script
            shutil.rmtree(told)


@case
def example_mpi(folder):
    with Bench(folder, ("ssh",), order=PAIR) as bench:
        arguments = (*SMALL, "--log-file", f"{folder}/steps.json")
        bench.script = [PLAIN, *arguments]
        wanted = losses_of("\n".join(agents(bench)), bench)
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
        assert_same(losses_of(text, bench), wanted)
