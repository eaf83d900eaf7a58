"""Tests the table of torch.distributed's backends."""

import pytest
from torch.distributed import distributed_c10d

from holmes_ext.runtime.groups.backend_table import Connect, traits_of


@pytest.fixture(params=[False, True], ids=["torch without nccl2", "torch with nccl2"])
def has_nccl2(request, monkeypatch):
    """Let torch look as if it had the backend nccl2, or not."""
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if request.param:
        monkeypatch.setattr(distributed_c10d, "_create_nccl2_process_group", None, raising=False)
    else:
        monkeypatch.delattr(distributed_c10d, "_create_nccl2_process_group", raising=False)
    return request.param


def test_nccl_is_nccl2_since_torch_2_15(has_nccl2):
    traits = traits_of("nccl")
    assert traits.name == "nccl"
    assert traits.binds_device is has_nccl2
    assert traits.returns_done_work is has_nccl2
    assert traits.connects is (Connect.WITH_GROUP if has_nccl2 else Connect.AT_FIRST_OPERATION)


@pytest.mark.parametrize("value, is_nccl2", [("0", False), ("1", True), ("", True)])
def test_an_environment_variable_selects_the_older_implementation(monkeypatch, value, is_nccl2):
    monkeypatch.setattr(distributed_c10d, "_create_nccl2_process_group", None, raising=False)
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", value)
    assert traits_of("nccl").binds_device is is_nccl2


@pytest.mark.parametrize("name", ["nccl", "nccl-legacy", "nccl2", "nccl-lazy", "NCCL2"])
def test_all_names_of_nccl_have_networks(name):
    traits = traits_of(name)
    assert traits.is_nccl and traits.is_known
    assert (traits.network_api, traits.device_type) == ("verbs", "cuda")


def test_only_nccl_lazy_has_communicators_of_pairs():
    names = ["nccl", "nccl-legacy", "nccl2", "nccl-lazy", "gloo"]
    assert [name for name in names if traits_of(name).has_pair_communicators] == ["nccl-lazy"]


@pytest.mark.parametrize("name", ["mpi", "ucc", "nccl4py"])
def test_backends_that_choose_their_networks_are_known(name):
    traits = traits_of(name)
    assert traits.is_known and not traits.is_nccl
    assert traits.network_api == ""


def test_a_name_of_another_package_is_unknown():
    traits = traits_of("mooncake")
    assert not traits.is_known and not traits.is_nccl
    assert traits.network_api == ""
