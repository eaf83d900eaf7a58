"""Tests which communicators of NCCL are postponed to the first operation of their group, without any NCCL."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch_releases import look_like_torch

from holmes_ext.runtime.groups import communicators


class Options:
    """Stand-in for ProcessGroupNCCL.Options of torch 2.15."""

    def __init__(self):
        self.config = SimpleNamespace(net_name=None)
        self.lazy_init = False


class OlderOptions:
    """Stand-in for ProcessGroupNCCL.Options before torch 2.15."""

    def __init__(self):
        self.config = SimpleNamespace(net_name=None)


@pytest.fixture(autouse=True)
def torch_2_15(monkeypatch):
    """Let torch look like torch 2.15."""
    look_like_torch(monkeypatch, "2.15")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)


def test_groups_are_postponed_inside_the_block_only():
    assert not communicators.are_postponed("nccl", None)
    with communicators.postponed():
        with communicators.postponed():
            pass
        assert communicators.are_postponed("nccl", None)
    assert not communicators.are_postponed("nccl", None)


@pytest.mark.parametrize(
    "backend, can_postpone",
    [("nccl", True), ("nccl2", True), ("nccl-lazy", True), ("nccl-legacy", False)],
)
def test_backends_that_can_postpone(backend, can_postpone):
    assert communicators.can_postpone(backend) is can_postpone


def test_older_torch_cannot_postpone(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=OlderOptions))
    assert not communicators.can_postpone("nccl2")


def test_options_with_a_network_of_the_program_are_not_changed():
    options = Options()
    options.config.net_name = "Socket"
    with communicators.postponed():
        assert not communicators.are_postponed("nccl", options)


def test_with_lazy_init():
    options = Options()
    assert communicators.with_lazy_init(options) is options
    assert options.lazy_init
    assert communicators.with_lazy_init(None).lazy_init
