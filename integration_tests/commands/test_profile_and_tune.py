"""Tests `--holmes-profile` and `holmes tune` with DeepSpeed's pipeline engine and with megatron-core.

The GPUs of one cluster are slower. The profile must show this, the plan made from it must give them fewer
layers, and the losses must not change.
"""

import json
import sys
from dataclasses import replace

from carriers import ON_GPUS, gloo_only, gpu_only, gpus
from holmes_lab.gpu.job import GpuClock

from holmes_ext.cli.main import main
from holmes_ext.plan.profile import load_profile
from integration_tests.jobs import SIZE, TRAIN, full, losses, same, stages_of, train, train_megatron

#: The GPUs of one cluster are 4 times as slow (the emulated ones, so that load cannot hide it).
SLOW = {"flops": 5e8, "classes": ["Block"], "speed": {"b": 0.25}}


def run(clusters, log, *flags):
    return train(
        clusters, log, "--stages", "2", *clusters.holmes, *flags, accelerator={**SLOW, "speed": {}}
    )


@gloo_only
def test_tune_and_the_run_that_follows(two_clusters, tmp_path, monkeypatch):
    """`holmes tune -- holmes lab run ...` gives the stage on the slow GPUs fewer layers.

    A training run with the plan that it wrote has the same stages.
    """
    monkeypatch.chdir(tmp_path)
    cluster = ["--cluster", str(two_clusters.file)]
    lab = [sys.executable, "-m", "holmes_ext.cli.main", "lab", "run", "--interleave", *cluster]
    lab += [
        "--preload",
        "torch,deepspeed",
        "--accelerator",
        json.dumps(SLOW),
        "--env",
        "DS_ACCELERATOR=cpu",
    ]
    job = [sys.executable, TRAIN, *SIZE, "--log", str(tmp_path / "short"), "--stages", "2"]
    assert main(["tune", *cluster, "--steps", "2", "--", *lab, "--", *job]) == 0
    uniform = losses(tmp_path / "short")
    assert 3 <= len(uniform) < 6  # it ended after the steps that were measured
    profile = load_profile("profile.json")
    slow = next(stage for stage in profile.stages if stage.clusters == ("b",))
    quick = next(stage for stage in profile.stages if stage.clusters == ("a",))
    assert sum(slow.forward_s + slow.backward_s) > 2 * sum(quick.forward_s + quick.backward_s) > 0
    assert (
        profile.blocks == 4
        and profile.micro_batches == 4
        and profile.activation_bytes == 2 * 16 * 128 * 4
    )
    assert (
        min(stage.reduction_s_per_byte for stage in profile.stages) > 0
        and profile.stages[0].stage_link_s > 0
    )
    assert not any(stage.tied_s for stage in profile.stages)

    text = run(two_clusters, tmp_path / "planned", "--holmes-plan", str(tmp_path / "plan.json"))
    assert stages_of(text) in ((5, 3), (3, 5))  # 3 + 1 blocks, or 1 + 3 with the slow stage first
    assert same(losses(tmp_path / "planned")[: len(uniform)], uniform)


@gloo_only
@full
def test_tune_with_torchrun_on_every_node(two_clusters, tmp_path):
    """`holmes tune -- torchrun ...` runs on each of four nodes, which share a folder.

    All nodes write the same plan, and torchrun starts a job with it.
    """
    torchrun = (
        f"{sys.executable} -m torch.distributed.run --nnodes 4 --nproc-per-node 1 --node-rank $NODE_RANK"
        f" --master-addr $MASTER_ADDR --master-port $MASTER_PORT {TRAIN} {' '.join(SIZE)} --stages 2"
    )
    clean = f"unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK; cd {tmp_path};"
    cluster = f"--cluster {two_clusters.file}"
    tune = (
        f"exec {sys.executable} -m holmes_ext.cli.main tune {cluster} --steps 2 --output "
        f"plan$NODE_RANK.json -- {torchrun} --log-file short"
    )
    real = f"exec {torchrun} --log-file planned --holmes --holmes-{cluster[2:]} --holmes-plan plan2.json"
    for command in (tune, real):
        result = two_clusters.run(
            "sh", "-c", f"{clean} {command}", env={"DS_ACCELERATOR": "cpu"}, accelerator=SLOW
        )
        text = "".join(result.outputs.values())
        assert result.returncode == 0, text
    assert len({(tmp_path / f"plan{node}.json").read_text() for node in range(4)}) == 1
    assert stages_of(text) in ((5, 3), (3, 5))
    run(two_clusters, tmp_path / "uniform")
    assert same(losses(tmp_path / "planned"), losses(tmp_path / "uniform"))


@gpu_only
@full
def test_a_gpu_s_own_times_are_measured(two_clusters, tmp_path):
    """CUDA events measure emulated GPUs that are a quarter as fast in one cluster.

    The losses do not change.
    """
    train(two_clusters, tmp_path / "stock", "--stages", "2")
    slow = GpuClock(flops=4e8, speed={"b": 0.25})
    path = tmp_path / "profile.json"
    train(
        two_clusters,
        tmp_path / "log",
        "--stages",
        "2",
        *two_clusters.holmes,
        "--holmes-profile",
        f"2,{path}",
        gpus=replace(gpus(), clock=slow),
    )
    assert same(losses(tmp_path / "log"), losses(tmp_path / "stock"))
    seconds_of = {
        stage.clusters: sum(stage.forward_s + stage.backward_s)
        for stage in load_profile(path).stages
    }
    assert seconds_of["b",] > 2 * seconds_of["a",] > 0


@full
def test_megatron_core(two_clusters, tmp_path):
    """The first of two equal trainings is measured, and both have the same losses."""
    path = tmp_path / "profile.json"
    splits = dict.fromkeys(("measured", "again"), "--pipeline 2 --micro-batches 4 --steps 6")
    flags = (*two_clusters.holmes, "--holmes-sizes", "pipeline=2")
    slow = {}
    if ON_GPUS:
        slow["gpus"] = replace(gpus(), clock=GpuClock(flops=2e8, speed={"b": 0.25}))
    results, _, _ = train_megatron(
        two_clusters, tmp_path, splits, *flags, options=slow, HOLMES_PROFILE=f"2,{path}"
    )
    losses_of = {name: [entry["loss"] for entry in results[name]["entries"]] for name in splits}
    assert losses_of["measured"] == losses_of["again"]
    profile = load_profile(path)
    assert [stage.blocks for stage in profile.stages] == [(0, 1), (2, 3)]
    assert profile.framework.startswith("megatron-core")
    assert all(min(stage.forward_s + stage.backward_s) > 0 for stage in profile.stages)
    seconds_of = {
        stage.clusters: sum(stage.forward_s + stage.backward_s) for stage in profile.stages
    }
    assert not ON_GPUS or seconds_of["b",] > 2 * seconds_of["a",]
    # gradient_bytes: of the embedding, of each block, and of what follows the blocks
    assert profile.gradient_bytes[1] == profile.gradient_bytes[4]
    assert min(profile.gradient_bytes) >= 0
    assert min(profile.gradient_bytes[index] for index in (0, 1, -1)) > 0
