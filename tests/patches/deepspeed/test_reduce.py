from types import SimpleNamespace

import pytest
from clusters import example

from holmes_ext.options import Options
from holmes_ext.patches.deepspeed import reduce as deepspeed_reduce
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import ReductionSpec
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process

SITE = example()


class Engine(SimpleNamespace):
    """Mock of DeepSpeed's pipeline engine with the attributes that overlap_of() reads."""

    __hash__ = object.__hash__

    def __init__(self, stages=2, tensor=1, **zero):
        data = 4 // stages // tensor
        grid = SimpleNamespace(pipe_parallel_size=stages, model_parallel_size=tensor)
        config = SimpleNamespace(_param_dict={"zero_optimization": zero} if zero else {})
        super().__init__(
            num_stages=stages,
            stage_id=0,
            is_data_parallel=data > 1,
            global_rank=0,
            grid=grid,
            _config=config,
        )


@pytest.fixture
def overlapped(monkeypatch):
    monkeypatch.setattr(deepspeed_reduce, "unsupported", lambda engine: None)
    monkeypatch.setattr(deepspeed_reduce, "backend_of", lambda: "gloo")
    monkeypatch.setattr(deepspeed_reduce, "_Overlap", lambda engine: object())

    def ask(engine, option, sizes=None):
        options = Options(overlap=option)
        plan = build_plan(SITE, sizes, options=options)
        monkeypatch.setattr(
            session,
            "_active",
            session.Session(
                options, Process(0, 4, 0, 1, "", 0, "test"), SITE, plan, 0, maker=maker
            ),
        )
        return deepspeed_reduce.overlap_of(engine) is not None

    return ask


@pytest.mark.parametrize("sizes", [None, Sizes(pipeline=2)])
@pytest.mark.parametrize("option, expected", [("auto", True), ("on", True), ("off", False)])
def test_a_reduction_that_would_be_waited_for_is_overlapped_by_default(
    overlapped, option, sizes, expected
):
    assert overlapped(Engine(), option, sizes) is expected


def test_the_plan_decides_for_each_stage(overlapped, monkeypatch):
    monkeypatch.setattr(
        session.Session,
        "stages",
        lambda current, sizes, backend: (ReductionSpec(False, 1), ReductionSpec(True, 1)),
    )
    last = Engine()
    last.stage_id = 1
    assert not overlapped(Engine(), "auto") and overlapped(last, "auto")


@pytest.mark.parametrize("option", ["auto", "on"])
def test_nothing_to_reduce(overlapped, option, capsys):
    assert not overlapped(Engine(stages=4), option) and not capsys.readouterr().err


def test_the_users_own_setting_wins_over_auto(overlapped, capsys):
    assert not overlapped(Engine(overlap_comm=False), "auto")
    assert (
        "not overlapped, DeepSpeed's own is used: zero_optimization.overlap_comm is false"
        in capsys.readouterr().err
    )
    assert overlapped(Engine(overlap_comm=True), "auto") and overlapped(Engine(stage=1), "auto")


def test_what_is_not_supported_is_said_once(overlapped, monkeypatch, capsys):
    monkeypatch.setattr(deepspeed_reduce, "unsupported", lambda engine: "sparse gradients")
    engine = Engine()
    assert not overlapped(engine, "auto") and not overlapped(engine, "auto")
    assert capsys.readouterr().err.count("DeepSpeed's own is used: sparse gradients") == 1
