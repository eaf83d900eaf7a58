"""Tests how patches/deepspeed/partition.py divides the layers of a PipelineModule among pipeline stages."""

from types import SimpleNamespace

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed import partition
from holmes_ext.patches.deepspeed.partition import borders_of, check_borders

# tied embedding and head: None
GPT = [None, "Positions", "Block", "Block", "Block", "Block", "LayerNorm", None]


def test_borders_are_blocks_with_what_stands_around_them():
    assert borders_of(GPT, (3, 1), "p") == [0, 5, 8]
    assert borders_of(GPT, (1, 1, 1, 1), "p") == [0, 3, 4, 5, 8]
    assert borders_of(GPT, (4,), "p") == [0, 8]


def test_between_blocks():
    assert borders_of([None, "B", None, "B", None, "B"], (2, 1), "p") == [0, 5, 6]


def test_of_two_classes_that_repeat_alike_the_plan_tells():
    assert borders_of(["E", "B", "B", "H", "H", "H", "N"], (2, 1), "p") == [0, 5, 7]


@pytest.mark.parametrize(
    "names, message",
    [
        (GPT, "2.1 = 3 layers, but the model has 4 layers of class Block"),
        ([None], "no layer class that repeats"),
    ],
)
def test_another_model(names, message):
    with pytest.raises(HolmesError, match=message):
        borders_of(names, (2, 1), "plan.json")


def test_the_users_borders():
    assert check_borders([0, 4, 11], 11, 2) == [0, 4, 11]


@pytest.mark.parametrize(
    "borders, message",
    [
        ([0, 11], "2 borders for 2 stages; give 3"),
        ([0, 11, 20], "the borders must rise from 0 to 11"),
        ([-1, 0, 11], "the borders must rise from 0 to 11"),
        ([0, 4, 10], "rise from 0 to 11"),
        ([0, 0, 11], "rise"),
        ([1, 4, 11], "rise"),
        ([0, 4.5, 11], "whole"),
    ],
)
def test_bad_borders(borders, message):
    with pytest.raises(HolmesError, match=message):
        check_borders(borders, 11, 2)


@pytest.mark.parametrize("method, kept", [("type:Block", [0, 4, 8]), ([0, 3, 8], None)])
def test_deepspeeds_own_split_is_kept_where_the_plans_takes_its_place(monkeypatch, method, kept):
    plan = SimpleNamespace(stage_layers=(1, 3), source="the plan", partition="planned")
    monkeypatch.setattr(partition.session, "active", lambda: SimpleNamespace(plan=plan))
    monkeypatch.setattr(partition, "class_name", lambda spec: spec)
    module = type("Module", (SimpleNamespace,), {"__hash__": object.__hash__})(
        num_stages=2, global_rank=1, _layer_specs=[None, None, *["Block"] * 4, None, None]
    )
    module._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
    module._set_bounds = lambda start, stop: None
    partition._partition_layers(
        lambda method: setattr(module, "parts", [0, 4, 8]), module, (method,), {}
    )
    assert module.parts == [0, 3, 8] and partition.stock_parts.get(module) == kept


def test_module_takes_a_list_and_a_text(monkeypatch, capsys):
    """With the patch, DeepSpeed's PipelineModule accepts the first layer of each stage as partition_method.

    After the patch is undone, DeepSpeed refuses it again.
    """
    pipe = pytest.importorskip("deepspeed.runtime.pipe.module")
    from holmes_ext.patches import Registry
    from holmes_ext.patches.deepspeed.partition import PATCHES

    registry = Registry(PATCHES)

    def parts(method):
        """Return the first layer of each stage and the end, and the layers (first, end) of stage 1."""
        six_layers = [len] * 6  # of any class
        # Has what DeepSpeed's _partition_layers reads of a PipelineModule, on the rank of stage 1.
        module = SimpleNamespace(num_stages=2, global_rank=1, loss_fn=None, _layer_specs=six_layers)
        module._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
        layers_of_this_stage = []
        module._set_bounds = lambda start=None, stop=None: layers_of_this_stage.append(
            (start, stop)
        )
        # Bind the method, which is patched, to the stand-in, and call it.
        holder = type("Module", (), {"_partition_layers": pipe.PipelineModule._partition_layers})
        partition_layers = pipe.PipelineModule._partition_layers.__get__(module, holder)
        partition_layers(method)
        return module.parts, layers_of_this_stage[-1]

    registry.enable(["deepspeed-partition"], required=True)  # apply the patch
    try:
        assert parts([0, 2, 6]) == parts("0,2,6") == ([0, 2, 6], (2, 6))
        assert parts("uniform") == ([0, 3, 6], (3, 6))
    finally:
        registry.undo()
    with pytest.raises(NotImplementedError):
        parts("0,2,6")
