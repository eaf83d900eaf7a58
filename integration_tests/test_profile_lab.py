"""--holmes-profile on real engines: what is measured shows the slower GPUs, the plan that follows moves layers, and the loss stays."""

import argparse

from test_deepspeed_partition_lab import losses, stages_of
from test_deepspeed_two_clusters import SIZE, TRAIN
from test_megatron_core_lab import train as train_megatron

from holmes_ext.cli import tune
from holmes_ext.plan.profile import load_profile


def run(two_clusters, log, *flags, speed=1.0, **env):
    result = two_clusters.run(
        TRAIN, *SIZE, "--log", str(log), "--stages", "2", "--holmes", "--holmes-cluster", str(two_clusters.file), "--holmes-sizes", "pipeline=2", *flags,
        preload=("torch", "deepspeed"), env={"DS_ACCELERATOR": "cpu", **env}, accelerator={"flops": 5e8, "classes": ["Block"], "speed": {"b": speed}},
    )  # fmt: skip
    text = "".join(result.outputs.values())
    assert result.returncode == 0, text
    return text


def test_tune_and_the_run_that_follows(two_clusters, tmp_path):
    """The GPUs of one cluster are 4 times as slow (the emulated ones, so that load cannot hide it): its stage gets fewer layers."""
    run(two_clusters, tmp_path / "uniform")
    path = tmp_path / "profile.json"
    run(two_clusters, tmp_path / "short", speed=0.25, HOLMES_PROFILE=f"2,{path},stop")
    assert len((tmp_path / "short").read_text().splitlines()) < 6  # it ended after the steps that were measured
    profile = load_profile(path)
    slow = next(stage for stage in profile.stages if stage.clusters == ("b",))
    fast = next(stage for stage in profile.stages if stage.clusters == ("a",))
    assert sum(slow.forward_s + slow.backward_s) > 2 * sum(fast.forward_s + fast.backward_s) > 0
    assert profile.blocks == 4 and profile.micro_batches == 4 and profile.activation_bytes == 2 * 16 * 128 * 4
    assert min(stage.reduction_s_per_byte for stage in profile.stages) > 0 and profile.stages[0].edge_s > 0
    args = argparse.Namespace(overlap="off", partition="balanced", alpha=1.0, output=str(tmp_path / "plan.json"))
    assert tune.make(args, path) == 0
    text = run(two_clusters, tmp_path / "planned", "--holmes-plan", str(tmp_path / "plan.json"))
    assert stages_of(text) in ((5, 3), (3, 5))  # 3 + 1 blocks, or 1 + 3 with the slow stage first
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
