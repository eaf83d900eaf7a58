"""Tests a wrapper that keeps init_process_group of torch 2.15 from making an NCCL communicator at once.

torch then makes the communicator at the first operation. The wrapper is used by programs that switch holmes
on after init_process_group, by a call of holmes_ext.initialize_model_parallel.
"""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch_releases import look_like_torch

from holmes_ext.patches.torch import late_start
from holmes_ext.runtime import session


class Options:
    """Stand-in for ProcessGroupNCCL.Options of torch 2.15."""

    def __init__(self):
        self.lazy_init = False


@pytest.fixture(autouse=True)
def torch_2_15(monkeypatch):
    """Let torch look like torch 2.15."""
    look_like_torch(monkeypatch, "2.15")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


def options_given(backend="nccl", ranks=(), options=None):
    """Make a group by the wrapper, and return the options that torch's function receives."""
    received = []

    def new_process_group_helper(global_ranks_in_group, backend, backend_options=None):
        received.append(backend_options)

    late_start._postpone_communicator(
        new_process_group_helper, None, (list(ranks), backend), {"backend_options": options}
    )
    return received[0]


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_the_default_group_is_postponed(backend):
    assert options_given(backend).lazy_init
    options = Options()
    assert options_given(backend, options=options) is options
    assert options.lazy_init


def test_other_groups_are_not():
    assert options_given(ranks=(0, 1)) is None


def test_gloo_has_no_communicator():
    assert options_given("gloo") is None


def test_nothing_changes_while_holmes_is_on(monkeypatch):
    monkeypatch.setattr(session, "_active", SimpleNamespace())
    assert options_given() is None
