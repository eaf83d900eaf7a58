"""Tests traits_of(), which returns what holmes must know of a backend of torch.distributed.

The release of torch decides, for example, whether "nccl" makes a communicator together with a process group.
"""

import pytest
from torch_releases import look_like_torch

from holmes_ext.runtime.backend import Connect, traits_of


@pytest.mark.parametrize("release, is_nccl2", [("2.13", False), ("2.14", False), ("2.15", True)])
def test_nccl_is_nccl2_since_torch_2_15(monkeypatch, release, is_nccl2):
    look_like_torch(monkeypatch, release)
    traits = traits_of("nccl")
    assert traits.name == "nccl"
    assert traits.is_nccl2 is is_nccl2
    assert traits.connects is (Connect.WITH_GROUP if is_nccl2 else Connect.AT_FIRST_OPERATION)


@pytest.mark.parametrize("release", ["2.14", "2.15"])
@pytest.mark.parametrize("is_nccl2", [False, True])
def test_torch_says_which_implementation_nccl_is(monkeypatch, release, is_nccl2):
    """TORCH_DIST_USE_NCCL2 selects it when torch registers the backend."""
    look_like_torch(monkeypatch, release, nccl_is_nccl2=is_nccl2)
    assert traits_of("nccl").is_nccl2 is is_nccl2


def test_nccl2_of_torch_2_14_connects_like_nccl_legacy(monkeypatch):
    look_like_torch(monkeypatch, "2.14")
    for name in ("nccl2", "nccl-lazy"):
        traits = traits_of(name)
        assert traits.is_nccl2
        assert traits.connects is Connect.AT_FIRST_OPERATION


@pytest.mark.parametrize("name", ["nccl", "nccl-legacy", "nccl2", "nccl-lazy", "NCCL2"])
def test_all_names_of_nccl_have_networks(monkeypatch, name):
    look_like_torch(monkeypatch, "2.15")
    traits = traits_of(name)
    assert traits.name == name.lower()
    assert traits.is_nccl and traits.is_known
    assert (traits.network_api, traits.device_type) == ("verbs", "cuda")


def test_only_nccl_lazy_has_communicators_of_pairs(monkeypatch):
    look_like_torch(monkeypatch, "2.15")
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
