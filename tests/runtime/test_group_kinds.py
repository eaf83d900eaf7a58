import pytest

from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.measure.operations import kind_of, sent_bytes

SIXTEEN = Sizes(pipeline=4, tensor=2).complete(16)  # grid[pp, dp, tp] of 4 x 2 x 2


@pytest.mark.parametrize(
    "ranks, kind",
    [
        ((0, 1), "tensor"),
        ((1, 3), "data"),
        ((0, 4, 8, 12), "pipeline"),
        ((4, 8), "pipeline"),
        ((0, 12), "embedding"),
        (range(16), "world"),
        ((0, 1, 4, 5), "other"),
        ((0, 1, 2, 3), "other"),
        ((0,), "other"),
    ],
)
def test_from_the_ranks(ranks, kind):
    assert kind_of(tuple(ranks), "", SIXTEEN, 16) == kind


def test_one_axis_that_is_all_is_not_the_world():
    assert kind_of((0, 1, 2, 3), "", Sizes().complete(4), 4) == "data"
    assert kind_of((0, 1, 2, 3), "", None, 4) == "world"
    assert kind_of((0, 1), "", None, 4) == "other"


def test_data_and_context_together_are_data():
    sizes = Sizes(context=2, pipeline=2).complete(8)
    assert kind_of((0, 1, 2, 3), "", sizes, 8) == "data"
    assert kind_of((0, 1), "", sizes, 8) == "context"


@pytest.mark.parametrize(
    "description, kind",
    [
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_DATA_PARALLEL_GROUP_GLOO", "data"),
        ("POSITION_EMBEDDING_GROUP", "embedding"),
        ("EMBEDDING_GROUP", "embedding"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", "other"),
        ("hierarchical across", "data"),
        ("pipeline pair", "pipeline"),
        ("pipeline gradients", "pipeline"),
        ("CONTEXT_PARALLEL_GROUP", "context"),
        ("default_pg", "world"),
        ("mesh_dp_shard_cp", "data"),
        ("mesh_replicate", "data"),
        ("mesh_tp", "tensor"),
        ("mesh_pp", "pipeline"),
    ],
)
def test_a_description_counts_more(description, kind):
    assert kind_of((0, 1), description, SIXTEEN, 16) == kind


def test_sent_bytes():
    assert sent_bytes("all_reduce", 1000, 4, "gloo") == 1500
    assert sent_bytes("all_gather", 1000, 4, "gloo") == 3000
    assert sent_bytes("reduce_scatter", 1000, 4, "nccl") == 3000
    assert (
        sent_bytes("reduce_scatter", 1000, 4, "gloo") == 6000
    )  # FACTS: gloo's moves all-reduce's bytes
    assert (
        sent_bytes("send", 1000, 2, "gloo") == 1000 and sent_bytes("receive", 1000, 2, "gloo") == 0
    )
    assert (
        sent_bytes("barrier", 0, 4, "gloo") == 0 and sent_bytes("all_reduce", 1000, 1, "gloo") == 0
    )
