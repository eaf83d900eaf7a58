"""Tests of patches/megatron_gather.

megatron-core's DistributedDataParallel and DistributedOptimizer are stand-ins.
"""

from types import SimpleNamespace

import pytest
import torch

from holmes_ext.patches.megatron.reduce import gather as megatron_gather


def config(**changes):
    return SimpleNamespace(
        **{
            "use_distributed_optimizer": True,
            "overlap_param_gather": False,
            "fp8_param_gather": False,
            **changes,
        }
    )


class Group:
    """A bucket group; `log` gets what is done to it."""

    def __init__(self, name, log):
        self.name, self.log, self.buckets = name, log, [object()]
        (
            self.param_gather_handle,
            self.param_gather_dispatched,
            self.next_param_gather_bucket_group,
        ) = (
            None,
            False,
            "another",
        )

    def start_param_sync(self):
        assert not self.param_gather_dispatched
        self.param_gather_handle, self.param_gather_dispatched = "handle", True
        self.log.append(f"start {self.name}")

    def finish_param_sync(self, skip_next_bucket_dispatch):
        assert skip_next_bucket_dispatch
        self.param_gather_handle = None
        self.log.append(f"wait {self.name}")


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    monkeypatch.setattr(
        megatron_gather,
        "registry",
        lambda: SimpleNamespace(is_on=lambda name: name == "megatron-gather"),
    )


@pytest.fixture
def parts():
    """Return (ddp, dense optimizer, log)."""
    log = []
    dense, experts = (
        [Group("last layers", log), Group("first layers", log)],
        [Group("experts", log)],
    )
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    ddp = SimpleNamespace(module=module, bucket_groups=dense, expert_parallel_bucket_groups=experts)
    made = config()
    assert megatron_gather.set_gather_overlap(made)
    buffers = [SimpleNamespace(buckets=[bucket for group in dense for bucket in group.buckets])]
    megatron_gather.finish_gathers_before_state_dict(ddp)
    return ddp, SimpleNamespace(ddp_config=made, buffers=buffers, model_chunks=[ddp]), log


def test_turned_on_once_for_all_chunks_and_not_where_it_does_not_suit(monkeypatch):
    made = config()
    assert (
        megatron_gather.set_gather_overlap(made)
        and made.overlap_param_gather
        and megatron_gather.set_gather_overlap(made)
    )
    for other in (
        config(overlap_param_gather=True),
        config(use_distributed_optimizer=False),
        config(fp8_param_gather=True),
    ):
        before = other.overlap_param_gather
        assert (
            not megatron_gather.set_gather_overlap(other) and other.overlap_param_gather == before
        )
    monkeypatch.setattr(
        megatron_gather, "registry", lambda: SimpleNamespace(is_on=lambda name: False)
    )
    assert (
        not megatron_gather.set_gather_overlap(other := config()) and not other.overlap_param_gather
    )


def test_a_step_starts_its_own_gathers_first_layers_first(parts):
    ddp, optimizer, log = parts
    assert megatron_gather._gather_after_step(lambda: True, optimizer, (), {}) is True
    # the experts have an optimizer, and a step, of their own
    assert log == ["start first layers", "start last layers"]
    optimizer.ddp_config = config(overlap_param_gather=True)
    megatron_gather._gather_after_step(lambda: True, optimizer, (), {})
    assert len(log) == 2  # the program's own overlap is left to megatron-core


def vars_of(module):
    """state_dict() without its hooks."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize(
    "read",
    [
        lambda module: module.state_dict(),
        lambda module: module[1][0].state_dict(
            prefix="", keep_vars=True
        ),  # as sharded_state_dict() does it
        lambda module: module.load_state_dict(
            {name: tensor + 1 for name, tensor in vars_of(module).items()}
        ),
    ],
    ids=["whole", "layer", "load"],
)
def test_reading_weights_waits_for_every_gather(parts, read):
    ddp, optimizer, log = parts
    megatron_gather._gather_after_step(lambda: True, optimizer, (), {})
    log.clear()
    read(ddp.module)
    assert sorted(log) == ["wait first layers", "wait last layers"]
    read(ddp.module)
    assert len(log) == 2 and all(
        group.next_param_gather_bucket_group is None for group in ddp.bucket_groups
    )
