"""Tests torchtitan's own train.py with holmes on two emulated clusters, with HSDP and with a pipeline.

The losses must be those without holmes. torchtitan is written for GPUs; torchtitan_cpu/sitecustomize.py lets
it train on CPUs here. Versions of torchtitan that the tests run with:

    0.2.2    `make torchtitan` installs it
    0.3.0    needs torch 2.14.1 or newer (it calls torch.distributed.set_timeout); installed by
             pip install --no-deps --target build/torchtitan torchtitan==0.3.0 spmd_types torch_checkpointing
"""

import re
import sys

import pytest
from carriers import ON_GPUS

from integration_tests.jobs import ROOT, full, said, same

pytest.importorskip("tokenizers")
from integration_tests.stacks.torchtitan_job import INSTALLED, WAYS, job_arguments, write_job  # noqa: E402

pytestmark = [
    pytest.mark.row("torchtitan"),
    pytest.mark.skipif(
        not INSTALLED.is_dir(), reason="no torchtitan in build/torchtitan: make torchtitan"
    ),
]

#: Every rank has a cache of data sets of its own: ranks that write to the same cache disturb each other.
LAUNCH = (
    "HF_HOME=$(mktemp -d -p .) exec"
    f" {sys.executable} -m torch.distributed.run --nproc-per-node 1 --nnodes 4 --node-rank $NODE_RANK"
    " --master-addr $MASTER_ADDR --master-port $MASTER_PORT -m torchtitan.train"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_job(tmp_path_factory.mktemp("torchtitan"))


def train(clusters, folder, way, *flags):
    """Train, and return {step: loss as it is printed} and the messages of holmes.

    The last stage prints the losses with five decimals.
    """
    options = " ".join(job_arguments(*way.split()))
    path = str(INSTALLED) if ON_GPUS else f"{ROOT}/integration_tests/torchtitan_cpu:{INSTALLED}"
    result = clusters.run(
        "sh",
        "-c",
        f"cd {folder}; {LAUNCH} {options} {' '.join(flags)}",
        timeout=300,
        env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
    )
    assert result.returncode == 0, result.outputs
    text = re.sub(r"\x1b\[[0-9;]*m", "", "".join(result.outputs.values()))
    matches = re.findall(r"step: *(\d+) +loss: *([0-9.]+)", text)
    return {int(step): loss for step, loss in matches}, said(result)


@full  # rows/test_rows.py trains torchtitan in each landing
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.row("HSDP")] if way == "HSDP" else []) for way in WAYS],
)
def test_losses_are_stock_s(two_clusters, folder, way):
    stock, _ = train(two_clusters, folder, WAYS[way])
    ours, told = train(two_clusters, folder, WAYS[way], *two_clusters.holmes)
    assert sorted(stock) == sorted(ours) == [1, 2, 3, 4] and float(ours[4]) < float(ours[1])
    stock_losses = [float(stock[step]) for step in stock]
    our_losses = [float(ours[step]) for step in stock]
    # NCCL adds in the order of its ring, which can change the last of five printed decimals.
    assert same(stock_losses, our_losses, 2e-5 if ON_GPUS else 0.0), (stock, ours)
    assert any("ranks renumbered" in line for line in told), told
