"""Tests that a job of megatron-core restarts with better layers for each stage.

The job runs under torchrun --max-restarts, and one cluster is a third as fast as the other, which holmes is
not told. After a checkpoint, the job must restart and continue with the losses of a job without holmes.
"""

import json
import re
import sys

import pytest
from clusters import toml

from integration_tests.jobs import SCRIPTS, full, lab_fixture, said

STEPS = 16
SIZE = (
    "--layers 6 --hidden 64 --heads 2 --sequence 32 --micro-batch 1 --micro-batches 4 --pipeline 2"
)
#: A layer takes 0.02 s forward and backward on cluster a.
ACCELERATOR = {
    "flops": 5e8,
    "classes": ["TransformerLayer"],
    "layout": "sbh",
    "speed": {"b": 1 / 3},
}
two_nodes = lab_fixture(toml("a ib 1Gb/s a0", "b roce 1Gb/s b0", ethernet="1Gb/s"))


def torchrun(nodes, save, *flags, env=None, **options):
    """Run a job with two agents, and return its result and {step: loss}."""
    arguments = " ".join(
        [
            str(save),
            SIZE,
            "--steps",
            str(STEPS),
            "--save-every",
            "4",
            "--log-file",
            str(save) + ".log",
            *flags,
        ]
    )
    command = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d "
        f"--rdzv-id {save.name} --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT --max-restarts 2 "
        f"--monitor-interval 0.2 {SCRIPTS / 'resumes.py'} {arguments}"
    )
    result = nodes.lab.start(
        ["sh", "-c", command],
        order=nodes.order,
        timeout=400,
        grace=30.0,
        env={"OMP_NUM_THREADS": "1", **(env or {})},
        **options,
    ).wait()
    assert result.returncode == 0, result.outputs
    log = save.with_name(save.name + ".log").read_text().splitlines()
    return result, {entry["step"]: entry["loss"] for entry in map(json.loads, log)}


@full
def test_a_job_starts_again_with_better_layers(two_nodes, tmp_path):
    _, stock = torchrun(two_nodes, tmp_path / "stock", env={"GLOO_SOCKET_IFNAME": "eth0"})
    result, losses = torchrun(
        two_nodes,
        tmp_path / "again",
        *two_nodes.holmes,
        "--holmes-restart",
        "auto",
        accelerator=ACCELERATOR,
    )
    text = "\n".join(said(result))
    message = re.search(
        r"starts again after its next checkpoint: a restart with --holmes-partition (\d),(\d) "
        r"would take (0\.\d+) of a step",
        text,
    )
    assert message, result.outputs
    first, last, share = message.groups()  # layers of both stages, share of the step time
    assert int(first) > int(last) and float(share) < 0.95
    assert f"started again with --holmes-partition {first},{last}" in text, text
    assert f"stages of {first}+{last} layers" in "".join(result.outputs.values())
    assert losses == pytest.approx(stock, abs=1e-6) and set(losses) == set(range(1, STEPS + 1))
