"""Partitions on DeepSpeed's real engine over two emulated clusters: the stages are the plan's, and what is learned does not change."""

import json
import re

import pytest

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from integration_tests.conftest import some
from integration_tests.deepspeed.test_two_clusters import SIZE, STEPS, TRAIN

MODEL = """version = 1
layers = 4
hidden = 128
heads = 4
sequence = 16
vocabulary = 256
tied = false
[training]
micro_batch = 2
micro_batches = 4
activation_width = 4
[gpu]
flops = 5e9
[gpu.cluster.b]
flops = 1.5e9
"""


def run(two_clusters, log, *flags, stages=2, expect=0):
    result = two_clusters.run(
        TRAIN, *SIZE, "--log", str(log), "--stages", str(stages), "--holmes", "--holmes-cluster", str(two_clusters.file),
        "--holmes-sizes", f"pipeline={stages}", *flags, preload=("torch", "deepspeed"), env={"DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    text = "".join(result.outputs.values())
    assert result.returncode == expect, text
    return text


def losses(log):
    found = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert len(found) == STEPS and found[-1] < found[0]
    return found


def stages_of(text):
    """Layers (specs) of each stage as the script itself prints them."""
    return tuple(map(int, re.search(r"data \d+, stages of ([0-9+]+) layers", text)[1].split("+")))


@pytest.fixture(scope="module")
def uniform(two_clusters, tmp_path_factory):
    log = tmp_path_factory.mktemp("uniform") / "log"
    return stages_of(run(two_clusters, log)), losses(log)


def same_loss(log, uniform):
    assert max(abs(a - b) for a, b in zip(losses(log), uniform[1])) <= 1e-6


@pytest.mark.parametrize("partition", ["speed", "balanced"])
def test_slower_gpus_get_fewer_layers_and_the_loss_stays(two_clusters, tmp_path, uniform, partition):
    assert uniform[0] == (4, 4)  # embedding, positions, 2 blocks; 2 blocks, norm, head
    (tmp_path / "m.toml").write_text(MODEL)
    text = run(two_clusters, tmp_path / "log", "--holmes-partition", partition, "--holmes-model", str(tmp_path / "m.toml"))
    assert f"{partition} stages of 3+1 layers" in text
    assert stages_of(text) == (5, 3)
    same_loss(tmp_path / "log", uniform)


@pytest.mark.parametrize("method", some(["uniform", "parameters", "type:Embedding"], "parameters"))
def test_whatever_method_the_script_chose(two_clusters, tmp_path, uniform, method):
    text = run(two_clusters, tmp_path / "log", "--holmes-partition", "1,3", "--partition-method", method)
    assert stages_of(text) == (3, 5)
    same_loss(tmp_path / "log", uniform)


def test_a_plan_file_with_tied_layers_and_recomputation(two_clusters, tmp_path):
    more = ("--tied", "--activation-checkpoint", "2")
    build_plan(site_from_spec(two_clusters.spec), Sizes(2), stage_layers=(3, 1)).save(tmp_path / "plan.json")
    run(two_clusters, tmp_path / "stock", *more)
    text = run(two_clusters, tmp_path / "planned", *more, "--holmes-plan", str(tmp_path / "plan.json"))
    assert stages_of(text) == (5, 3)
    same_loss(tmp_path / "planned", (None, losses(tmp_path / "stock")))


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--holmes-partition", "balanced"), "partition 'balanced' needs to know the model: give --holmes-model FILE"),
        (("--holmes-partition", "1,1,2"), "layers 1,1,2: 3 numbers for 2 pipeline stages"),
        (("--holmes-partition", "2,3"), "2+3 = 5 layers, but the model has 4 layers of class Block"),
    ],
)
def test_what_does_not_fit_is_one_line(two_clusters, tmp_path, flags, message):
    text = run(two_clusters, tmp_path / "log", *flags, expect=2)
    assert message in text and "Traceback" not in text
