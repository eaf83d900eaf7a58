"""Tests the plans of four DeepSpeed jobs in tests/inputs: precision, offload, BF16_Optimizer, experts.

Each folder has the command line of a job, its ds_config, and the clusters if they are not those of two.toml.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import spec as clusters_spec

from holmes_ext.cli import plan as plan_command
from holmes_ext.cli.show.training import training_of
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import MEGATRON_DEEPSPEED
from holmes_ext.patches.megatron.command_line import model as command_line_model
from holmes_ext.patches.megatron.command_line.describe import describe
from holmes_ext.patches.megatron.command_line.refusals import refusals
from holmes_ext.patches.traits import engine_of
from holmes_ext.plan.cost.model import Gpu, Mode, StateBytes, on_clusters, precision_of
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.number_formats import has_bfloat16, lines_about_bfloat16
from holmes_ext.plan.shape import shape_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.launch_flags import launches, limited
from holmes_ext.planner.search.as_plan import layout_candidate
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.simulated import memory_of
from holmes_ext.planner.search.space import Limits, shapes
from holmes_ext.samples import examples

INPUTS = Path(__file__).parents[1] / "inputs"
#: Releases of DeepSpeed that differ in bf16 at ZeRO 0.
RELEASES = ("0.14.4", "0.18.4", "0.19.8")


class Job:
    """A job of tests/inputs, with its clusters and the layout of its command line."""

    def __init__(self, folder, ds_config=None, flags="", gpus=0):
        """Read the job.

        Args:
            folder: Folder of tests/inputs.
            ds_config: Path of another ds_config than the job's own.
            flags: Flags that follow those of the job.
            gpus: Number of GPUs, on one cluster in place of the job's own.
        """
        own_clusters = INPUTS / folder / "cluster.toml"
        clusters = own_clusters if own_clusters.exists() else INPUTS / "two.toml"
        words = (INPUTS / folder / "command").read_text().split()
        words[words.index("ds.json")] = str(ds_config or INPUTS / folder / "ds.json")
        words += flags.split()
        self.spec = load_spec(clusters)
        if gpus:
            self.spec = clusters_spec(f"c ib 800Gb/s n[1-{gpus // 8}] processes=8 gpu=A100")
        self.site = site_from_spec(self.spec)
        self.command_line = describe(words)
        self.sizes = self.command_line.sizes.complete(self.site.world_size, 8)
        model = on_clusters(self.command_line.model, self.spec)
        self.engine = engine_of(self.command_line.framework)
        limits = limited(Limits(), self.engine, "megatron-deepspeed", bool(model.experts))
        batch = model.global_batch
        self.result = SearchResult(Network(self.site), model, batch, limits, engine=self.engine)

    @property
    def layout(self):
        """Return the candidate of the command line's own layout."""
        shape = shape_of(self.result.model, self.sizes, self.command_line.zero, virtual=1)
        return layout_candidate(self.result, self.sizes, shape)

    @property
    def shapes(self):
        """Return all shapes that a search examines."""
        result = self.result
        return list(shapes(result.network, result.model, result.global_batch, result.limits))

    @property
    def refusals(self):
        """Return why the framework refuses the layout."""
        return list(refusals(self.command_line, self.sizes, self.site.world_size))

    def ds_config(self):
        """Return the ds_config of the layout."""
        result = self.result
        launch = launches(self.layout, result.model, result.global_batch, True, "c.toml", "")
        return launch["megatron-deepspeed"].config


@pytest.fixture(params=RELEASES)
def deepspeed_release(monkeypatch, request):
    monkeypatch.setattr(command_line_model, "release", lambda: request.param)
    return request.param


def test_fp16_stays_fp16():
    config = Job("fp16_becomes_bf16").ds_config()
    assert config["fp16"] == {"enabled": True} and "bf16" not in config


@pytest.mark.parametrize(
    "gpu, precision, expected",
    [
        ("A100", "bf16", "bf16"),
        ("A100", "fp16", "fp16"),
        ("A100", "", "bf16"),  # a model file: only 2 bytes are known
        ("V100", "", "fp16"),
        ("V100", "bf16", "fp16"),
        ("V100", "fp32", "fp32"),
    ],
)
def test_a_gpu_without_bfloat16_gets_none(gpu, precision, expected):
    model = Job("fp16_becomes_bf16").result.model
    gpus = {"ib": Gpu(), "roce": Gpu(has_bfloat16=has_bfloat16(gpu))}
    assert precision_of(replace(model, precision=precision, gpus=gpus)) == expected


@pytest.mark.parametrize(
    "names, expected",
    [
        (
            "V100 Tesla_V100-SXM2-16GB V100S Tesla-T4 T4 P100-PCIE-16GB RTX-2080 TITAN_V K80 MI50",
            False,
        ),
        (
            "A100 NVIDIA-A100-SXM4-40GB H100 H200 B200 GB200 L4 L40S A10G RTX-4090 MI250X MI300X",
            True,
        ),
    ],
)
def test_gpus_with_bfloat16(names, expected):
    for name in names.split():
        assert has_bfloat16(name) is expected, name
        assert has_bfloat16(name.replace("-", " ")) is expected, name


def test_bf16_on_such_a_gpu_is_a_line():
    spec = Job("bf16_optimizer").spec
    old = replace(spec, clusters=tuple(replace(item, gpu="V100") for item in spec.clusters))
    (line,) = lines_about_bfloat16("bf16", old)
    assert line.startswith("not possible: bf16 on gpu 'V100' of cluster jz") and "--fp16" in line
    assert not [*lines_about_bfloat16("fp16", old), *lines_about_bfloat16("bf16", spec)]


def test_offload_goes_with_zero_1_2_and_3_only():
    """Optimizer states on the CPU are not counted on the GPU, and no plan with ZeRO 0 lacks them."""
    job = Job("offload_zero0")
    assert {shape.zero for shape in job.shapes} == {1, 2, 3} and not job.refusals
    assert memory_of(job.result, job.layout, stage=0).optimizer == 0


def test_offload_at_zero_0_is_refused(tmp_path):
    config = tmp_path / "ds.json"
    config.write_text(
        '{"fp16": {"enabled": true}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}'
    )
    words = (INPUTS / "offload_zero0" / "command").read_text().replace("--zero-stage 2", "")
    command_line = describe(words.replace("ds.json", str(config)).split())
    (line,) = refusals(command_line, command_line.sizes.complete(32, 8), 32)
    assert (
        "offload_optimizer needs ZeRO 1, 2 or 3" in line and "set zero_optimization.stage" in line
    )


@pytest.mark.parametrize("precision, is_read", [("fp16", True), ("", False)])
def test_a_models_file_with_a_ds_config(tmp_path, precision, is_read):
    """The ds_config says what DeepSpeed keeps, unless its precision is not that of the model's file."""
    config = tmp_path / "ds.json"
    content = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    if precision:
        content[precision] = {"enabled": True}
    config.write_text(json.dumps(content))
    parser = argparse.ArgumentParser()
    plan_command.add_parser(parser.add_subparsers())
    clusters = str(INPUTS / "two.toml")
    model_file = str(examples() / "models" / "gpt_7.5b.toml")
    words = ["plan", "--cluster", clusters, "--model", model_file]
    job = ["--", "train.py", "--deepspeed_config", str(config)]
    model = training_of(parser.parse_args([*words, *job]), load_spec(clusters)).model
    assert bool(model.state_of_mode) is is_read
    if is_read:
        assert (model.precision, model.state_bytes, model.sharded_bytes) == ("fp16", 2, 0)
        assert Mode(0, has_pipeline=False) not in model.state_of_mode


def test_megatron_lms_offload_needs_its_distributed_optimizer():
    flags = (
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --micro-batch-size 1 "
        "--global-batch-size 64 --vocab-size 50257 --bf16 --optimizer-cpu-offload"
    )
    for more, is_refused in (("", True), ("--use-distributed-optimizer", False)):
        command_line = describe(f"{flags} {more}".split())
        lines = [*refusals(command_line, Sizes(data=32), world=32)]
        assert bool(lines) is is_refused
        assert Mode(0, has_pipeline=False) not in command_line.model.state_of_mode
    state = command_line.model.state_of_mode[Mode(1, has_pipeline=True)]
    assert state == StateBytes(weights=2, gradients=4, optimizer=0, sharded=("optimizer",))


def test_states_are_on_the_gpu_without_offload():
    with_offload = Job("offload_zero0").result.model.state_of_mode.values()
    without_offload = Job("fp16_becomes_bf16").result.model.state_of_mode.values()
    assert {state.optimizer for state in with_offload} == {0}
    assert {state.optimizer for state in without_offload} == {12}


def test_bloom_fits_its_own_gpus(deepspeed_release):
    """BLOOM-176B trained on this layout: bf16, ZeRO 0, pipeline; BF16_Optimizer shards optimizer states.

    By hand, for the first stage: (6 x 2.47e9 + 3.6e9) / 4 parameters a rank, with 12 / 8 bytes of optimizer
    states each, 2 of weights, and 4 or 6 of gradients.
    """
    job = Job("bf16_optimizer")
    memory = memory_of(job.result, job.layout, stage=0)
    parameters = memory.weights / 2
    gradient_bytes = 6 if deepspeed_release == "0.14.4" else 4
    assert memory.optimizer == pytest.approx(12 / 8 * parameters)
    assert memory.gradients == pytest.approx(gradient_bytes * parameters)
    assert job.layout.fits and not job.refusals
    # Its weights are gathered after the step, as under ZeRO 1.
    assert job.layout.shape.zero == 0 and job.layout.shape.traffic_zero(job.result.model) == 1


def test_fp32_sums_at_zero_0_are_refused_by_new_releases(deepspeed_release, tmp_path):
    text = (INPUTS / "bf16_optimizer" / "ds.json").read_text()
    config = tmp_path / "ds.json"
    config.write_text(text.rstrip()[:-1] + ', "data_types": {"grad_accum_dtype": "fp32"}}')
    job = Job("bf16_optimizer", ds_config=config)
    is_refused = any("cannot sum bf16 gradients in fp32" in line for line in job.refusals)
    assert is_refused == (deepspeed_release == "0.19.8")
    assert (0 in {shape.zero for shape in job.shapes}) != is_refused


def test_experts_have_no_pipeline_and_their_sizes_are_searched():
    job = Job("moe_pipeline")
    assert {shape.pipeline for shape in job.shapes} == {1}
    assert {shape.zero for shape in job.shapes} == {0, 1, 2}
    assert {shape.expert for shape in job.shapes} == {1, 2, 4, 8, 16, 32}
    assert job.layout.shape in job.shapes


def test_expert_sizes_divide_the_experts_of_each_layer(tmp_path):
    """Layers of 32 and of 64 experts (PR-MoE) count as 48 each, but 3 divides neither."""
    config = tmp_path / "ds.json"  # 480 sequences are a multiple of 24 data-parallel ranks
    config.write_text('{"train_batch_size": 480, "train_micro_batch_size_per_gpu": 4}')
    flags = "--num-experts 32 32 32 32 32 32 64 64 64 64 64 64 --moe-expert-parallel-size 1"
    job = Job("moe_pipeline", config, flags, gpus=24)
    assert job.result.model.experts == 48
    assert {shape.expert for shape in job.shapes} == {1, 2, 4, 8}


def test_a_pipeline_of_experts_cannot_be_limited_to():
    with pytest.raises(HolmesError, match="pipeline=2: megatron-deepspeed can only 1"):
        limited(
            Limits({"pipeline": (2,)}), MEGATRON_DEEPSPEED, "megatron-deepspeed", has_experts=True
        )
    limited(Limits({"pipeline": (2,)}), MEGATRON_DEEPSPEED, "megatron-deepspeed")  # no experts


def test_flags_of_experts():
    job = Job("moe_pipeline")
    launch = launches(job.layout, job.result.model, 512, True, "c.toml", "")["megatron-deepspeed"]
    text = " ".join(launch.flags)
    assert not launch.lacks and "--no-pipeline-parallel" in text
    assert "--num-experts 128 --moe-expert-parallel-size 32" in text
