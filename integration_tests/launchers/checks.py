"""Test cases of --holmes-check under each launcher, with the unmodified scripts of Megatron.

A case starts the same command twice on two nodes: with --holmes-check, and with --holmes-check=json while the
RoCE port of b0 is down. Each time, one rank reports, and no rank begins to train. The script is that of a
checkout (tests/checkouts.py), or one of plain torch if there is none. It needs GPUs: without the check, it
would end with an error.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence

from checkouts import find_checkout

from integration_tests.launchers import cases
from integration_tests.launchers.bench import PAIR, Bench
from integration_tests.launchers.cases import PATIENCE, case, hostfile
from integration_tests.megatron.test_megatron_lm import FLAGS, MEGATRON

#: Starts a program and its arguments as a job of all nodes; it must end with the status. Returns the output.
Start = Callable[[Sequence[str], int], str]
#: Last line of the report.
END = "; the job ends before its first step"


def megatron_lm(bench: Bench) -> list[str]:
    """Return Megatron-LM's pretrain_gpt.py and arguments; without a checkout, a script of plain torch."""
    if MEGATRON is None:
        return bench.script
    script = str(MEGATRON / "pretrain_gpt.py")
    return [
        script,
        *FLAGS,
        "--save",
        str(bench.folder / "saved"),
        "--holmes-cluster",
        str(bench.file),
    ]


def megatron_deepspeed(bench: Bench) -> list[str]:
    """Return Megatron-DeepSpeed's pretrain_gpt.py with its arguments; see megatron_lm()."""
    source = find_checkout("Megatron-DeepSpeed")
    if source is None:
        return bench.script
    config = bench.folder / "ds_config.json"
    config.write_text(json.dumps({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}))
    return [
        str(source / "pretrain_gpt.py"),
        *FLAGS,
        *("--deepspeed", "--deepspeed_config", str(config), "--save", str(bench.folder / "saved")),
        *("--holmes-cluster", str(bench.file)),
    ]


def examine(bench: Bench, program: Sequence[str], start: Start) -> str:
    """Check a job twice, and return the output of the launcher for status 1.

    Args:
        program: Script and arguments, without --holmes-check.
    """
    output = start([*program, "--holmes-check"], 0)
    assert _reports(output) == ["check: 0 problems" + END], output
    assert ("predicted step: " in output) == (program != bench.script), output

    bench.lab.set_link("b0", "roce0", up=False)
    try:
        output = start([*program, "--holmes-check=json"], 1)
    finally:
        bench.lab.set_link("b0", "roce0", up=True)
    document = _document(output)
    assert document["status"] == 1
    (problem,) = document["problems"]
    assert problem.startswith("node b0, b: ") and problem.endswith("; ethernet is used instead")
    assert [placed["nodes"] for placed in document["placement"]] == list(PAIR)
    written = {path.name for path in bench.folder.iterdir()}
    assert not written & {"saved", "losses", "rank0.json"}, written  # of a training job
    return output


def _reports(output: str) -> list[str]:
    """Return the last line of each report in the output of all ranks.

    mpirun gives the ranks a terminal, so the report has colors. deepspeed adds the node's name to each line.
    """
    output = re.sub(r"\x1b\[[\d;]*m", "", output)
    assert output.count("who runs where") == output.count(END), output
    return ["check: " + line.partition("check: ")[2] for line in output.splitlines() if END in line]


def _document(output: str) -> dict:
    """Return the JSON that one rank printed."""
    (line,) = [line for line in output.splitlines() if '"placement": ' in line]
    return json.loads(line[line.index("{") :])


@case
def torchrun_check(folder):
    with Bench(folder, processes=2, order=PAIR) as bench:

        def start(program: Sequence[str], status: int) -> str:
            bench.script = list(program)
            programs = [
                bench.daemons.program(cases.torchrun(bench), host, None) for host in bench.order
            ]
            result = bench.lab.start_programs(programs, timeout=PATIENCE).wait()
            assert set(result.statuses.values()) == {status}, result.outputs
            return "\n".join(result.outputs.values())

        output = examine(bench, megatron_lm(bench), start)
        assert "ChildFailedError" in output and "exitcode  : 1" in output, output


@case
def srun_check(folder):
    with Bench(folder, ("slurm",), processes=2, order=PAIR) as bench:

        def start(program: Sequence[str], status: int) -> str:
            return bench.run("srun", *bench.all, sys.executable, *program, status=status)

        output = examine(bench, megatron_lm(bench), start)
        # Ranks of a node that end at the same time share a line: "tasks 2-3".
        line = r"srun: error: \w+: tasks? [\d,-]+: Exited with exit code 1\n"
        assert re.search(line, output), output


@case
def mpirun_check(folder):
    with Bench(folder, ("ssh",), processes=2, order=PAIR) as bench:

        def start(program: Sequence[str], status: int) -> str:
            bench.script = list(program)
            return bench.run(*cases.mpirun(bench, "--hostfile", hostfile(bench)), status=status)

        output = examine(bench, megatron_lm(bench), start)
        assert "1 process returned\na non-zero exit code" in output, output


@case
def deepspeed_check(folder):
    with Bench(folder, ("ssh",), processes=2, order=PAIR) as bench:

        def start(program: Sequence[str], status: int) -> str:
            bench.script = list(program)
            return bench.run(*cases.deepspeed(bench), status=status)

        output = examine(bench, megatron_deepspeed(bench), start)
        assert "exits with return code = 1\n" in output, output
        assert "pdsh@login: a0: ssh exited with exit code 1\n" in output, output
