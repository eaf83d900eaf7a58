"""`holmes plan -- COMMAND`: options of holmes in the command, what is switched off, its framework."""

import json

import clusters
import pytest

from holmes_ext.cli.main import main

SITE = clusters.toml("a ib 100Gb/s a[0-1]", "b roce 50Gb/s b[0-1]", ethernet="1Gb/s", processes=4)
GPT = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --bf16"
    " --micro-batch-size 2 --global-batch-size 64 --vocab-size 50257 --tensor-model-parallel-size 2"
)


@pytest.fixture
def planned(capsys, monkeypatch, tmp_path):
    (tmp_path / "cluster.toml").write_text(SITE)

    def of(*words, off=""):
        monkeypatch.setenv("HOLMES_DISABLE", off)
        own = (
            "--cluster",
            str(tmp_path / "cluster.toml"),
            "--limit",
            "pipeline=1,2",
            "--limit",
            "micro_batch=2",
        )
        assert main(["plan", *own, "--seconds", "2", "--json", "--", *GPT.split(), *words]) == 0
        return json.loads(capsys.readouterr().out)

    return of


PIPELINE = "--pipeline-model-parallel-size", "2"


def step(found):
    return found["yours"]["step_seconds"]


def test_a_feature_that_is_off_is_not_counted_on(planned):
    whole = planned(*PIPELINE)
    assert step(planned(*PIPELINE, off="megatron-slices")) > 1.2 * step(whole), (
        "each tensor rank sends all"
    )
    assert step(planned(*PIPELINE, off="megatron-tied")) > 1.2 * step(whole), (
        "each rank sums with its twin"
    )
    assert (
        whole["yours"]["in_flight"]
        and not planned(*PIPELINE, off="megatron-stage-links")["yours"]["in_flight"]
    )
    assert step(planned(*PIPELINE, off="deepspeed-compression")) == step(whole), (
        "that is DeepSpeed's"
    )


def test_the_commands_own_options_are_in_the_plan(planned):
    whole, compression = (
        planned(*PIPELINE),
        planned(*PIPELINE, "--holmes-compress-activations", "int8", off="deepspeed-compression"),
    )
    assert step(compression) < 0.95 * step(whole)
    assert {
        stage_link["compression"]
        for traffic in compression["plan"]["traffic"]
        for stage_link in traffic["stage_links"]
    } == {"int8"}
    compressed = planned("--holmes-compress-gradients", "int8")
    reductions = [one for traffic in compressed["plan"]["traffic"] for one in traffic["reductions"]]
    assert {one["compress"] for one in reductions} == {"int8"}


def test_megatron_sums_hierarchically_where_its_flags_say_so(planned):
    zero = "--use-distributed-optimizer"
    flat, two = planned(zero), planned(zero, "--num-distributed-optimizer-instances", "2")
    assert flat["yours"]["reductions"] == ["flat"] and two["yours"]["reductions"] == [
        "hierarchical"
    ]
    assert step(two) < 0.6 * step(flat)


def test_the_users_layout_is_never_better_than_the_best(planned):
    found = planned(*PIPELINE, off="megatron-stage-links")
    assert found["candidates"][0]["step_seconds"] <= step(found)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            GPT.replace("layers 8", "layers 44") + " --pipeline-model-parallel-size 8",
            "--num-layers 44 does not divide by --pipeline-model-parallel-size 8; nearest that do: 4; or "
            "--holmes-partition",
        ),
        (
            GPT.replace("heads 16", "heads 50")
            .replace("hidden-size 1024", "hidden-size 1000")
            .replace("size 2", "size 4"),
            "--num-attention-heads 50 does not divide by --tensor-model-parallel-size 4; nearest that do: 2",
        ),
    ],
)
def test_what_the_framework_will_refuse_is_told_with_the_nearest_that_works(
    capsys, tmp_path, words, message
):
    (tmp_path / "cluster.toml").write_text(SITE)
    cluster = "--cluster", str(tmp_path / "cluster.toml")
    assert (
        main(["plan", *cluster, "--seconds", "1", "--limit", "pipeline=1", "--", *words.split()])
        == 0
    )
    assert message in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", *cluster, "--", *words.split(), "--holmes"]) == 1
    assert message in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_misspelt_flag_of_holmes(capsys, tmp_path):
    (tmp_path / "cluster.toml").write_text(SITE)
    words = *GPT.split(), "--holmes", "--holmez-cluster", "c.toml"
    assert main(["plan", "--cluster", str(tmp_path / "cluster.toml"), "--", *words]) == 2
    assert "--holmez-cluster: did you mean --holmes-cluster?" in capsys.readouterr().err
    assert main(["doctor", "--cluster", str(tmp_path / "cluster.toml"), "--", *words]) == 1
    assert "did you mean --holmes-cluster?" in capsys.readouterr().out


def test_a_gpu_that_nobody_knows_is_told(capsys, tmp_path):
    """Its NVLink would be left out without a word."""
    (tmp_path / "cluster.toml").write_text(
        SITE.replace('nodes = ["a[', 'gpu = "A10O"\nnodes = ["a[')
    )
    words = (
        "plan",
        "--cluster",
        str(tmp_path / "cluster.toml"),
        "--seconds",
        "1",
        "--limit",
        "pipeline=1",
    )
    assert main([*words, "--", *GPT.split()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    message = (
        "not known: gpu 'A10O' of cluster a: did you mean 'A100'?; without gpu_flops, "
        "gpu_memory_bytes, nvlink"
    )
    assert message in said
