"""Tests how holmes checks megatron-core's parallel sizes and sets the plan's layers for each pipeline stage.

Most tests need no megatron-core. One starts a new process, in which it compares holmes's results with those
of the installed megatron-core.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from clusters import example
from torch_releases import look_like_torch

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches.megatron import core as megatron_core
from holmes_ext.patches.megatron import drop_in
from holmes_ext.patches.megatron.reduce import reduction as megatron_reduction
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.launcher import Process

ROOT = Path(__file__).parents[3]
SITE = example()
DEFAULTS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "num_distributed_optimizer_instances": 1,
    "order": "tp-cp-ep-dp-pp",
}


def session(sizes=None, **changes):
    plan = replace(build_plan(SITE, sizes), **changes)
    return Session(Options(), Process(0, 4, 0, 1, "", 0, "test"), SITE, plan, 0, maker=maker)


def asked(**changes):
    return {**DEFAULTS, **changes}


def test_sizes_of_a_call():
    sizes = megatron_core.sizes_of(
        asked(pipeline_model_parallel_size=2, tensor_model_parallel_size=4, order="TP-CP-EP-PP-DP"),
        64,
    )
    assert sizes == Sizes(pipeline=2, tensor=4, data=8, order="tp-cp-ep-pp-dp")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"pipeline_model_parallel_size": 3}, "pipeline 3 .* does not divide the world size 64"),
        ({"order": "tp-cp-ep-dp-xx"}, "its parts are tp, cp, ep, dp, pp"),
        ({"order": "tp-dp", "pipeline_model_parallel_size": 2}, "lacks pp, whose size is 2"),
        ({"order": "tp-tp-dp-pp"}, "at most once"),
        (
            {"virtual_pipeline_model_parallel_size": 2},
            "needs pipeline_model_parallel_size 2 or more",
        ),
        (
            {"num_distributed_optimizer_instances": 5},
            "instances is 5, which does not divide data 64",
        ),
        ({"expert_model_parallel_size": 7}, "expert size 7 does not divide"),
        (
            {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 32},
            "32 x expert_tensor_parallel_size 4 does not divide the 64 ranks",
        ),
        (
            {
                "order": "tp-cp-ep-pp-dp",
                "pipeline_model_parallel_size": 2,
                "expert_model_parallel_size": 4,
            },
            "does not end in pp",
        ),
    ],
)
def test_sizes_that_cannot_be_made_are_told_before_any_group_is(changes, message):
    with pytest.raises(HolmesError, match=message):
        megatron_core.sizes_of(asked(**changes), 64)


def test_layout_notation():
    assert megatron_core.layout_of((3, 1)) == "Ettt|tL"
    assert megatron_core.layout_of((0, 2, 0, 1), mtp_layers=2) == "E|tt||tmmL"


def default_group(monkeypatch, backend, *, initialized=False, device=None):
    """Set a default group of this backend, as a program has initialized it with options of its own."""
    look_like_torch(monkeypatch, "2.13")
    own = SimpleNamespace(
        options=SimpleNamespace(_timeout=timedelta(minutes=3)), _is_initialized=lambda: initialized
    )
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: backend)
    return SimpleNamespace(_get_backend=lambda device: own, bound_device_id=device), own.options


def test_taking_over_keeps_the_timeout_options_and_device_of_the_programs_init(monkeypatch):
    world, options = default_group(monkeypatch, "nccl")
    again = drop_in._init_arguments(world)
    assert again == {"backend": "nccl", "timeout": timedelta(minutes=3), "pg_options": options}
    world, _ = default_group(monkeypatch, "gloo", device="cuda:0")
    assert drop_in._init_arguments(world) == {
        "backend": "gloo",
        "timeout": timedelta(minutes=3),
        "device_id": "cuda:0",
    }


@pytest.mark.parametrize("state", [{"initialized": True}, {"device": "cuda:0"}])
def test_taking_over_after_nccl_has_made_a_communicator_is_refused(monkeypatch, state):
    """Which HCAs and interface it may use, NCCL reads once in a process."""
    world, _ = default_group(monkeypatch, "cpu:gloo,cuda:nccl", **state)
    with pytest.raises(HolmesError, match="comes too late: NCCL has made a communicator already"):
        drop_in._init_arguments(world)


@pytest.fixture
def torch_2_15(monkeypatch):
    """Let torch look like torch 2.15, whose "nccl" is always bound to a device."""
    options = SimpleNamespace(lazy_init=False)
    look_like_torch(monkeypatch, "2.15")
    nccl = SimpleNamespace(Options=lambda: options)
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "nccl")


def world_of_2_15(lazy_init, has_communicator):
    """Return a stand-in for the default group of torch 2.15 over nccl2."""
    nccl = SimpleNamespace(
        options=SimpleNamespace(lazy_init=lazy_init, _timeout=timedelta(minutes=3)),
        supports_splitting=not lazy_init or has_communicator,
    )
    return SimpleNamespace(_get_backend=lambda device: nccl, bound_device_id="cuda:1")


def test_taking_over_in_torch_2_15_keeps_the_device(torch_2_15):
    """The communicator was postponed (patches/torch/late_start.py). The new group makes it at once."""
    arguments = drop_in._init_arguments(world_of_2_15(lazy_init=True, has_communicator=False))
    assert arguments["device_id"] == "cuda:1"
    assert arguments["pg_options"].lazy_init is False


@pytest.mark.parametrize("lazy_init", [False, True])
def test_taking_over_in_torch_2_15_after_a_communicator_was_made(torch_2_15, lazy_init):
    world = world_of_2_15(lazy_init, has_communicator=True)
    way_out = "write `from holmes_ext import initialize_model_parallel` above init_process_group"
    with pytest.raises(HolmesError, match=way_out):
        drop_in._init_arguments(world)


def test_the_users_own_layout_wins_and_is_told(capsys):
    current = session(Sizes(pipeline=2), stage_layers=(3, 1))
    assert megatron_core.planned_layout(current, 2, 1, 4, 0, "") == "Ettt|tL"
    assert megatron_core.planned_layout(current, 2, 1, 4, 0, "Et|tttL") is None
    assert "your own (Et|tttL) wins over the plan's (3+1)" in capsys.readouterr().err
    assert (
        megatron_core.planned_layout(current, 2, 1, 4, 0, "Ettt|tL") is None
        and not capsys.readouterr().err
    )
    assert megatron_core.planned_layout(session(Sizes(pipeline=2)), 2, 1, 4, 0, "") is None


@pytest.mark.parametrize(
    "virtual, layers, message",
    [
        (2, 4, "has 2 entries, but the job runs pipeline 2 x virtual pipeline 2"),
        (1, 5, "adds up to 4"),
    ],
)
def test_a_plan_for_another_model_is_refused(virtual, layers, message):
    with pytest.raises(HolmesError, match=message):
        megatron_core.planned_layout(
            session(Sizes(pipeline=2), stage_layers=(3, 1)), 2, virtual, layers, 0, ""
        )


def test_recomputation_in_units_that_a_stage_would_cut():
    plan = session(Sizes(pipeline=2), stage_layers=(4, 2)).plan
    whole = SimpleNamespace(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
    )
    megatron_core.check_recompute_groups(plan, whole, last_may_be_shorter=False)
    megatron_core.check_recompute_groups(
        replace(plan, stage_layers=(3, 1)), whole, last_may_be_shorter=True
    )
    for field, value in (
        ("recompute_granularity", "selective"),
        ("recompute_method", "block"),
        ("recompute_num_layers", 1),
    ):
        other = SimpleNamespace(**{**vars(whole), field: value})
        megatron_core.check_recompute_groups(
            replace(plan, stage_layers=(3, 1)), other, last_may_be_shorter=False
        )
    with pytest.raises(
        HolmesError,
        match="stages of 3.1 layers are not whole units of the 2 layers that .* recompute_num_layers 1",
    ):
        megatron_core.check_recompute_groups(
            replace(plan, stage_layers=(3, 1)), whole, last_may_be_shorter=False
        )


def test_where_the_last_unit_ends_is_looked_up_once(monkeypatch):
    """The module megatron.core.recompute is searched for only once, not for every TransformerConfig.

    Versions of megatron-core with this module may recompute fewer layers in a stage's last unit.
    Megatron-LM's get_batch makes a TransformerConfig in every micro-batch.
    """
    searched_modules = []

    def find_no_module(name):
        searched_modules.append(name)

    monkeypatch.setattr(megatron_core, "find_spec", find_no_module)
    megatron_core._last_recompute_group_may_be_shorter.cache_clear()  # it is decorated with functools.cache
    answers = [megatron_core._last_recompute_group_may_be_shorter() for _ in range(3)]
    megatron_core._last_recompute_group_may_be_shorter.cache_clear()  # the next test gets the real answer
    assert answers == [False, False, False]
    assert searched_modules == ["megatron.core.recompute"]


def test_no_sync_functions_for_one_chunk_and_for_several():
    one, other = SimpleNamespace(no_sync="one"), SimpleNamespace(no_sync="other")
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=None, no_sync_func=None)
    megatron_reduction._no_sync_between_micro_batches(config, one)
    assert config.no_sync_func == "one"
    config = SimpleNamespace(virtual_pipeline_model_parallel_size=2, no_sync_func=None)
    megatron_reduction._no_sync_between_micro_batches(config, one)
    megatron_reduction._no_sync_between_micro_batches(config, other)
    assert config.no_sync_func == ["one", "other"]


INSTALLED = """
import sys, json, inspect, random
sys.path.insert(0, {on_cpu!r})
import megatron_cpu_shim
from megatron.core import parallel_state, package_info
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
import holmes_ext
from holmes_ext.patches import registry
from holmes_ext.patches.megatron import core as megatron_core
from holmes_ext.patches.megatron import drop_in
original = parallel_state.initialize_model_parallel
same = inspect.signature(holmes_ext.initialize_model_parallel) == inspect.signature(original)
draw, wrong = random.Random(1), []
for trial in range(300):
    pipeline, virtual = draw.randint(2, 6), draw.randint(1, 3)
    layers = tuple(draw.randint(0, 4) for _ in range(pipeline * virtual))
    layout = PipelineParallelLayerLayout(megatron_core.layout_of(layers), pipeline)
    layout.validate_layer_layout(sum(layers), None)
    built = [layout.layout[index % pipeline][index // pipeline] for index in range(len(layers))]
    if tuple(sum(kind.name == "decoder" for kind in entry) for entry in built) != layers:
        wrong.append(layers)
names = ["megatron-groups", "megatron-layers", "megatron-reduction", "megatron-gather", "megatron-p2p"]
registry().enable(names)
import megatron.core.distributed, megatron.core.optimizer, megatron.core.transformer.transformer_config
import megatron.core.pipeline_parallel.p2p_communication
states = {{status.target: status.state for status in registry().statuses() if status.feature in names}}
registry().undo()
undone = parallel_state.initialize_model_parallel is original
print(json.dumps({{"same": same, "wrong": wrong, "states": states, "undone": undone}}))
"""


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_the_installed_megatron_core_fits():
    """Same signature; 300 random splits read back as written; every patch applied; undone exactly."""
    code = INSTALLED.format(on_cpu=str(ROOT / "examples" / "megatron_core" / "on_cpu"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT / "tests",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["same"] and not report["wrong"] and report["undone"]
    states = report["states"]
    assert len(states) == 8 and set(states.values()) <= {"applied", "other version"}, states


@pytest.mark.parametrize(
    "layers, pipeline, expected",
    [
        ((3, 1), 2, {"first": 3}),
        ((4, 2, 2, 3), 4, {"first": 4, "last": 3}),
        ((4, 2, 3, 3), 4, "4+2+3+3, but this megatron-core lets only the first and the last stage"),
        (
            (1, 2, 0, 1),
            2,
            "lets only the first and the last stage have layers of their own; install 0.13 or newer",
        ),
    ],
)
def test_layers_of_each_stage_before_there_are_layouts(layers, pipeline, expected):
    if isinstance(expected, str):
        with pytest.raises(HolmesError, match=re.escape(expected)):
            megatron_core.layer_fields_of_end_stages(session(), layers, pipeline)
    else:
        fields = {f"num_layers_in_{end}_pipeline_stage": count for end, count in expected.items()}
        assert megatron_core.layer_fields_of_end_stages(session(), layers, pipeline) == fields
