"""--holmes-profile on real engines: what is measured shows the slower GPUs, the plan that follows moves layers, and the loss stays."""

import json
import os
import sys

import pytest

from holmes_ext.cli.main import main
from holmes_ext.plan.profile import load_profile
from integration_tests.deepspeed.test_partition import losses, stages_of
from integration_tests.deepspeed.test_two_clusters import SIZE, TRAIN
from integration_tests.megatron.test_core import train as train_megatron

#: The GPUs of one cluster are 4 times as slow (the emulated ones, so that load cannot hide it).
SLOW = {"flops": 5e8, "classes": ["Block"], "speed": {"b": 0.25}}


def run(two_clusters, log, *flags):
    result = two_clusters.run(
        TRAIN, *SIZE, "--log", str(log), "--stages", "2", "--holmes", "--holmes-cluster", str(two_clusters.file), *flags,
        preload=("torch", "deepspeed"), env={"DS_ACCELERATOR": "cpu"}, accelerator={**SLOW, "speed": {}},
    )  # fmt: skip
    text = "".join(result.outputs.values())
    assert result.returncode == 0, text
    return text


def test_tune_and_the_run_that_follows(two_clusters, tmp_path, monkeypatch):
    """`holmes tune -- holmes lab run ...`: the stage on the slow GPUs gets fewer layers, and the real run starts with the plan."""
    monkeypatch.chdir(tmp_path)
    lab = [sys.executable, "-m", "holmes_ext.cli.main", "lab", "run", "--interleave", "--cluster", str(two_clusters.file)]
    lab += ["--preload", "torch,deepspeed", "--accelerator", json.dumps(SLOW), "--env", "DS_ACCELERATOR=cpu"]
    job = [sys.executable, TRAIN, *SIZE, "--log", str(tmp_path / "short"), "--stages", "2"]
    assert main(["tune", "--cluster", str(two_clusters.file), "--steps", "2", "--", *lab, "--", *job]) == 0
    uniform = [json.loads(line)["loss"] for line in (tmp_path / "short").read_text().splitlines()]
    assert 3 <= len(uniform) < 6  # it ended after the steps that were measured
    profile = load_profile("profile.json")
    slow = next(stage for stage in profile.stages if stage.clusters == ("b",))
    fast = next(stage for stage in profile.stages if stage.clusters == ("a",))
    assert sum(slow.forward_s + slow.backward_s) > 2 * sum(fast.forward_s + fast.backward_s) > 0
    assert profile.blocks == 4 and profile.micro_batches == 4 and profile.activation_bytes == 2 * 16 * 128 * 4
    assert min(stage.reduction_s_per_byte for stage in profile.stages) > 0 and profile.stages[0].edge_s > 0
    assert not any(stage.tied_s for stage in profile.stages)
    text = run(two_clusters, tmp_path / "planned", "--holmes-plan", str(tmp_path / "plan.json"))
    assert stages_of(text) in ((5, 3), (3, 5))  # 3 + 1 blocks, or 1 + 3 with the slow stage first
    assert max(abs(a - b) for a, b in zip(losses(tmp_path / "planned"), uniform)) <= 1e-6


@pytest.mark.skipif(os.environ.get("HOLMES_TEST_FULL") != "1", reason="takes a minute: HOLMES_TEST_FULL=1 runs it")
def test_tune_with_torchrun_on_every_node(two_clusters, tmp_path):
    """`holmes tune -- torchrun ...` four times over, the files shared; each leaves the same plan.json, and torchrun starts the real run with it."""
    train = f"{TRAIN} {' '.join(SIZE)} --stages 2"
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --nnodes 4 --nproc-per-node 1 --node-rank $NODE_RANK"
        f" --master-addr $MASTER_ADDR --master-port $MASTER_PORT {train}"
    )
    clean = f"unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK; cd {tmp_path};"
    tune = f"exec {sys.executable} -m holmes_ext.cli.main tune --cluster {two_clusters.file} --steps 2 --output plan$NODE_RANK.json -- {torchrun} --log-file short"
    real = f"exec {torchrun} --log-file planned --holmes --holmes-cluster {two_clusters.file} --holmes-plan plan2.json"
    for command in (tune, real):
        result = two_clusters.run("sh", "-c", f"{clean} {command}", env={"DS_ACCELERATOR": "cpu"}, accelerator=SLOW)
        text = "".join(result.outputs.values())
        assert result.returncode == 0, text
    assert len({(tmp_path / f"plan{node}.json").read_text() for node in range(4)}) == 1
    assert stages_of(text) in ((5, 3), (3, 5))
    run(two_clusters, tmp_path / "uniform")
    assert max(abs(a - b) for a, b in zip(losses(tmp_path / "planned"), losses(tmp_path / "uniform"))) <= 1e-6


def test_megatron_core(two_clusters, tmp_path):
    """Measured in the first of two equal trainings: it does not change what the other one learns."""
    path = tmp_path / "profile.json"
    splits = dict.fromkeys(("measured", "again"), "--pipeline 2 --micro-batches 4 --steps 6")
    flags = ("--holmes", "--holmes-cluster", str(two_clusters.file), "--holmes-sizes", "pipeline=2")
    done, _, _ = train_megatron(two_clusters, tmp_path, splits, *flags, HOLMES_PROFILE=f"2,{path}")
    assert [entry["loss"] for entry in done["measured"]["entries"]] == [entry["loss"] for entry in done["again"]["entries"]]
    profile = load_profile(path)
    assert [stage.blocks for stage in profile.stages] == [(0, 1), (2, 3)] and profile.framework.startswith("megatron-core")
    assert all(min(stage.forward_s + stage.backward_s) > 0 for stage in profile.stages)
    assert profile.gradient_bytes[1] == profile.gradient_bytes[4] > 0 and profile.gradient_bytes[0] > 0 and profile.gradient_bytes[-1] > 0
