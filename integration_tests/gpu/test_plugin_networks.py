"""Tests of groups over a network plugin of NCCL that is called "Libfabric", as aws-ofi-nccl is on AWS."""

from pathlib import Path

import net_plugins
import pytest
from carriers import PHYSICAL
from clusters import toml
from holmes_lab import Lab

from holmes_ext.cluster.spec import parse_spec
from integration_tests.gpu.conftest import GpuLab

SCRIPT = str(Path(__file__).with_name("plugin_groups.py"))
#: Three nodes with one EFA device each.
TOML = toml("a efa 2Gb/s a[0-2]", ethernet="1Gb/s", processes=1)


@pytest.fixture(scope="module")
def efa_lab(gpus, tmp_path_factory):
    file = tmp_path_factory.mktemp("efa") / "cluster.toml"
    file.write_text(TOML)
    with Lab(parse_spec(TOML)) as lab:
        yield GpuLab(lab, file, gpus)


@pytest.fixture(scope="module")
def plugin(gpus, tmp_path_factory):
    """Compile a plugin that is the lab's under the name of aws-ofi-nccl's network, and return its path."""
    original = gpus.plugin if PHYSICAL else gpus.libraries.plugin
    path = tmp_path_factory.mktemp("plugin") / "libnccl-net-ofi.so"
    return str(net_plugins.rename_plugin(path, original, "Libfabric"))


def run(lab, plugin, *arguments, **variables):
    environ = {"NCCL_NET_PLUGIN": plugin, **variables}
    return lab.run(SCRIPT, *arguments, order="a0,a1,a2", processes=1, env=environ)


@pytest.mark.parametrize("described", [True, False])
def test_groups_go_over_the_plugins_network(efa_lab, plugin, described):
    """The user's NCCL_NET has an older name of the network; cluster.toml names none."""
    variables = {"HOLMES_CLUSTER": str(efa_lab.file)} if described else {}
    ran = run(efa_lab, plugin, NCCL_NET="AWS Libfabric", **variables)
    assert sorted(ran.json) == [[3.0], [3.0, 2.0], [3.0, 2.0]]
    assert {group.network for group in ran.groups} == {"Libfabric"}
    for nics in ran.sent.values():
        assert nics["efa0"] > 200_000 > nics["eth0"]
    name = "a" if described else "efa"
    assert (
        f"preflight: {name}: the plugin of NCCL's network 'Libfabric' was found on 3 of" in ran.said
    )
    assert f"groups on {name} request 'Libfabric' by name" in ran.said


def test_the_labs_own_plugin_stands_in_for_any_other(efa_lab, gpus):
    """A user of `holmes lab run --gpu` rehearses a job on EFA without the plugin of AWS."""
    plugin = str(gpus.plugin if PHYSICAL else gpus.libraries.plugin)
    ran = run(efa_lab, plugin, HOLMES_CLUSTER=str(efa_lab.file))
    assert sorted(ran.json) == [[3.0], [3.0, 2.0], [3.0, 2.0]]
    assert {(group.network, group.nics) for group in ran.groups} == {("IB", ("efa0",))}


def test_groups_with_a_node_without_the_plugin_go_over_ethernet(efa_lab, plugin):
    ran = run(efa_lab, plugin, "a2", HOLMES_CLUSTER=str(efa_lab.file))
    assert sorted(ran.json) == [[3.0], [3.0, 2.0], [3.0, 2.0]]
    networks = {len(group.ranks[0]): group.network for group in ran.groups}
    assert networks == {3: "Socket", 2: "Libfabric"}
    assert "was found on 2 of its 3 nodes" in ran.said
    lines = [line for line in ran.said.splitlines() if "NCCL cannot use" in line]
    assert len(lines) == 1 and "node a2: " in lines[0] and "NCCL_NET_PLUGIN=none" in lines[0]


def test_a_job_that_must_not_fall_back_ends_with_one_line(efa_lab, plugin):
    ran = run(efa_lab, plugin, "a1,a2", HOLMES_CLUSTER=str(efa_lab.file), HOLMES_FALLBACK="fail")
    assert ran.result.returncode != 0
    assert "nodes a1, a2: NCCL cannot use" in ran.said
    assert "--holmes-fallback ethernet" in ran.said
