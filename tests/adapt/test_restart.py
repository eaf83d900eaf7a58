"""Whether a launcher starts a job again with other layers, and what such a start reads."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from holmes_ext.adapt import restart
from holmes_ext.options import options_from
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.start.store import leave_layers, left_layers

ELASTIC = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "2"}


def agent(launcher="torchrun", agent_store=True):
    return Process(0, 2, 0, 1, "host", 1, launcher, agent_store)


@pytest.mark.parametrize(
    "process, options, engine, environ, said",
    [
        (agent(), {}, {}, ELASTIC, ""),
        (agent("srun", False), {}, {}, {}, "no launcher here"),
        (agent(agent_store=False), {}, {}, ELASTIC, "no launcher here"),
        (agent(), {}, {}, {**ELASTIC, "TORCHELASTIC_MAX_RESTARTS": "0"}, "no launcher here"),
        (
            agent(),
            {},
            {},
            {**ELASTIC, "TORCHELASTIC_RESTART_COUNT": "2"},
            "torchrun has done its 2 restarts",
        ),
        (
            agent(),
            {},
            {"name": "deepspeed", "resplits": False},
            ELASTIC,
            "checkpoints of deepspeed do not load",
        ),
        (
            agent(),
            {"partition": "4,2", "given": frozenset({"partition"})},
            {},
            ELASTIC,
            "--holmes-partition is",
        ),
        (agent(), {"given": frozenset({"plan"})}, {}, ELASTIC, "--holmes-plan is given"),
    ],
)
def test_why_not(process, options, engine, environ, said):
    why = restart.why_not(
        process, replace(options_from(restart="auto"), **options), EngineTraits(**engine), environ
    )
    assert said in why and bool(said) == bool(why)


def test_what_the_start_before_left():
    store = dist.HashStore()
    assert left_layers(store) == ("", None)
    leave_layers(store, "5,3", Sizes(2, data=2))
    assert left_layers(store) == ("5,3", Sizes(2, data=2))
