import json
from dataclasses import replace

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.ds_config import DsConfig, check, from_arguments
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.sizes import Sizes

PLAN = Plan("digest", ("a0", "a1", "b0", "b1"), 1, Sizes(pipeline=2).complete(4))


def config(**content):
    return DsConfig("ds.json", content, "x")


def test_the_file_is_found_in_both_spellings(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8}))
    found = from_arguments(["--deepspeed", "--deepspeed_config", str(path)])
    assert found.content == {"train_batch_size": 8} and len(found.digest) == 16
    assert from_arguments([f"--deepspeed_config={path}"]) == found
    assert from_arguments(["--lr", "1"]) is None
    path.write_text("{")
    assert from_arguments(["--deepspeed_config", str(path)]).content == {}


def test_what_agrees_passes():
    assert check(config(zero_optimization={"zero_quantized_gradients": True}), PLAN) == []
    assert check(config(), PLAN) == []
    assert (
        check(
            config(pipeline={"stages": 2, "partition": "best"}, zero_optimization={"stage": 1}),
            PLAN,
        )
        == []
    )
    assert check(config(pipeline={"partition": "uniform"}), PLAN) == []


@pytest.mark.parametrize(
    "content, plan, overlap, parts",
    [
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            Plan("digest", ("a0", "b0"), 2, processes_of={"a0": 2, "b0": 4}),
            "auto",
            "key 'zero_optimization.zero_quantized_gradients' is true, but nodes have different numbers "
            "of GPUs .2 on a0, 4 on b0.",
        ),
        (
            {"pipeline": {"stages": 4}},
            PLAN,
            None,
            "ds.json: key 'pipeline.stages' is 4, but the plan has 2",
        ),
        (
            {"pipeline": {"partition": "uniform"}},
            replace(PLAN, stage_layers=(3, 1)),
            "auto",
            "key 'pipeline.partition' is 'uniform', but the plan splits the layers 3\\+1",
        ),
        (
            {"zero_optimization": {"overlap_comm": True}},
            PLAN,
            "off",
            "overlap_comm' is true, but --holmes-overlap is off",
        ),
        (
            {"zero_optimization": {"overlap_comm": False}},
            PLAN,
            "on",
            "overlap_comm' is false, but --holmes-overlap is on",
        ),
    ],
)
def test_contradictions(content, plan, overlap, parts):
    with pytest.raises(HolmesError, match=parts):
        check(config(**content), plan, overlap)


def test_overlap_comm_under_a_pipeline_is_told():
    lines = check(config(zero_optimization={"overlap_comm": True}), PLAN)
    assert len(lines) == 1 and "has no effect" in lines[0]
    assert (
        check(
            config(zero_optimization={"overlap_comm": True}),
            replace(PLAN, sizes=Sizes().complete(4)),
        )
        == []
    )
