"""DeepSpeed's pipeline engine under torchrun, an agent on every node: what breaks in training comes back from the last checkpoint.

Losses must be those of the undisturbed job, and no step beyond the checkpoint may be missing.
"""

import json
import re
import sys
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from conftest import CLUSTER, ROOT, full  # noqa: E402

SIZE = "--layers 2 --hidden 64 --heads 2 --sequence 16 --micro-batch 2 --micro-batches 2 --stages 2".split()
STEPS = 8


@pytest.fixture(scope="module")
def undisturbed(two_clusters, tmp_path_factory):
    """Losses by step of the job without holmes and without faults."""
    log = tmp_path_factory.mktemp("undisturbed") / "log"
    train = str(ROOT / "examples" / "deepspeed_pipeline" / "train.py")
    result = two_clusters.run(train, *SIZE, "--steps", str(STEPS + 2), "--log", str(log), preload=("torch", "deepspeed"), env={"DS_ACCELERATOR": "cpu"})
    assert result.returncode == 0, result.outputs
    return losses(log)


def losses(log):
    """The losses by step; a step that was done twice (it was not in the checkpoint yet) must have had the same one."""
    found = {}
    for line in log.read_text().splitlines():
        step = json.loads(line)
        assert found.setdefault(step["step"], step["loss"]) == pytest.approx(step["loss"], abs=1e-6)
    return found


def torchrun(two_clusters, save, steps, *flags, restarts=6, env=None, when=None, then=lambda: None):
    """The job's result; `then` is called once, when the log has `when` lines."""
    arguments = " ".join([str(save), *SIZE, "--steps", str(steps), "--holmes", "--holmes-cluster", str(CLUSTER), "--holmes-sizes pipeline=2", *flags])
    command = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id {save.name}"
        f" --rdzv-endpoint $MASTER_ADDR:$MASTER_PORT --max-restarts {restarts} --monitor-interval 0.2 --rdzv-conf keep_alive_interval=20 {HERE / 'train.py'} {arguments}"
    )
    over = threading.Event()

    def wait_for_step():
        while not over.wait(0.05):
            if (save / "log").exists() and len((save / "log").read_text().splitlines()) >= when:
                then()
                return

    thread = threading.Thread(target=wait_for_step) if when else None
    if thread:
        thread.start()
    try:
        return two_clusters.run("sh", "-c", command, env=env, timeout=600, grace=60.0)
    finally:
        over.set()
        if thread:
            thread.join()


def assert_whole(save, step):
    """The checkpoint that `latest` names can be read, all of it."""
    import torch

    assert (save / "latest").read_text() == f"step{step}"
    files = list((save / f"step{step}").glob("*.pt"))
    assert files
    for file in files:
        torch.load(file, weights_only=False, map_location="cpu")


def said(result):
    return [line for lines in result.lines.values() for _, line in lines if "holmes:" in line]


@full
def test_a_nic_dies_and_comes_back(two_clusters, undisturbed, tmp_path):
    """Its cable is pulled in step 3: the job ends, starts again on Ethernet from its checkpoint, and uses the NIC at the next start."""
    lab, save = two_clusters.lab, tmp_path / "saved"
    save.mkdir()
    try:
        result = torchrun(two_clusters, save, STEPS, "--holmes-patience", "3", when=2, then=lambda: lab.set_link("b1", "roce0", up=False))
        lines = said(result)
        assert result.returncode == 0, result.outputs
        assert any(re.search(r"on node b1: NIC roce0 .mlx5_0:1. of node b1 .* has no link for .* the job ends here", line) for line in lines), lines
        assert any("node b1: mlx5_0:1 is DOWN" in line and "uses Ethernet instead" in line for line in lines), lines
    finally:
        lab.set_link("b1", "roce0", up=True)
    assert losses(save / "log") == pytest.approx({step: undisturbed[step] for step in range(1, STEPS + 1)}, abs=1e-6)
    assert_whole(save, STEPS)

    before = lab.counters()
    result = torchrun(two_clusters, save, STEPS + 2)
    assert result.returncode == 0 and not any("uses Ethernet" in line for line in said(result)), result.outputs
    assert losses(save / "log") == pytest.approx(undisturbed, abs=1e-6)
    assert two_clusters.sent(before)["b1"]["roce0"] > 0.2
