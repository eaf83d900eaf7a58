"""What `holmes doctor` says of NCCL, whatever is installed here."""

from dataclasses import replace

import clusters
import pytest
from packaging.version import Version

from holmes_ext.cluster.nccl import NcclOfNode, file_settings
from holmes_ext.cluster.nic import Gid, Nic
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.doctor import nccl

GID = Gid(3, "0000:0000:0000:0000:0000:ffff:0a02:0007", "roce_v2", "roce0")
ROCE = Nic(
    kind="roce",
    device="mlx5_0",
    port=1,
    netdevs=("roce0",),
    state="up",
    state_text="ACTIVE",
    rate_bps=10**11,
    addresses=("10.2.0.7/16",),
    gids=(GID,),
)
ETHERNET = Nic(
    kind="ethernet",
    device="eth0",
    netdevs=("eth0",),
    state="up",
    state_text="up",
    addresses=("10.0.0.1/16",),
)
NODE = NodeReport("b0.site.org", "id", "eth0", (ROCE, ETHERNET))
SPEC = clusters.toml("a ib 200Gb/s a0", "b roce 100Gb/s b0,b1", ethernet="25Gb/s")


@pytest.fixture(autouse=True)
def no_files(monkeypatch, tmp_path):
    monkeypatch.setattr(file_settings, "__defaults__", (str(tmp_path / "nccl.conf"),))
    monkeypatch.setattr(nccl, "installed_nccl", lambda: ("nvidia-nccl-cu12", Version("2.27.5")))
    return tmp_path


@pytest.mark.parametrize("spec", [None, SPEC])
def test_variables_and_the_network_of_each_kind_of_group(spec):
    lines = nccl.handed_over(NODE, spec and parse_spec(spec, "c.toml"), {})
    assert lines[:3] == [
        'NCCL_SOCKET_IFNAME="=eth0"',
        'NCCL_IB_HCA="=mlx5_0:1"',
        "NCCL_IB_GID_INDEX=3",
    ]
    fabric = "b" if spec else "roce"
    assert f"groups on {fabric} (roce): network 'IB'" in lines
    assert "groups on ethernet (ethernet): network 'Socket'" in lines
    assert "nvidia-nccl-cu12 2.27.5 takes each group's network by name" in lines[-1]


def test_a_node_without_verbs_has_sockets_alone():
    lines = nccl.handed_over(
        replace(NODE, nccl=NcclOfNode("there is no uverbs")), parse_spec(SPEC, "c.toml"), {}
    )
    assert not any("network 'IB'" in line or "NCCL_IB_HCA" in line for line in lines)
    assert any("NCCL cannot use mlx5_0:1" in line and "over sockets" in line for line in lines)


@pytest.mark.parametrize(
    "version, said",
    [
        ("2.16.2", "cannot be given a network by name"),
        ("2.18.1", "by name (case-insensitive)"),
        ("2.30.7", "by name (case-insensitive)"),
        ("2.31.1", "outside the versions that were checked"),
    ],
)
def test_what_the_installed_version_makes_of_it(monkeypatch, version, said):
    monkeypatch.setattr(nccl, "installed_nccl", lambda: ("nvidia-nccl-cu12", Version(version)))
    assert any(said in line for line in nccl.handed_over(NODE, None, {}))


def test_before_2_21_an_unset_gid_index_is_roce_v1(monkeypatch):
    unlike = replace(ROCE, device="mlx5_1", gids=(replace(GID, index=5),))
    node = replace(NODE, nics=(ROCE, unlike, ETHERNET))
    for version, warned in (("2.20.5", True), ("2.21.5", False)):
        monkeypatch.setattr(
            nccl, "installed_nccl", lambda version=version: ("nccl", Version(version))
        )
        lines = nccl.handed_over(node, parse_spec(SPEC, "c.toml"), {})
        assert any("takes GID 0" in line for line in lines) == warned
        assert not any(line.startswith("NCCL_IB_GID_INDEX=") for line in lines)


def test_a_node_of_no_cluster_is_told(monkeypatch):
    (line,) = nccl.handed_over(replace(NODE, name="x9"), parse_spec(SPEC, "c.toml"), {})
    assert line == "not known: x9 is in no cluster of c.toml"


def test_files_and_plugins_are_findings(no_files):
    (no_files / "nccl.conf").write_text("NCCL_IB_HCA=mlx5_7\n")
    forced = NcclOfNode("", "IB", "/etc/nccl.conf", "/opt/libnccl-net.so")
    levels = {finding.about: finding.level for finding in nccl.check_nccl(forced, {})}
    assert levels == {
        "/etc/nccl.conf": "problem",
        str(no_files / "nccl.conf"): "note",
        "/opt/libnccl-net.so": "note",
    }


@pytest.mark.parametrize(
    "version, environ, told",
    [
        ("2.27.7", {}, 0),
        ("2.28.9", {}, 1),
        ("2.29.7", {}, 1),
        ("2.29.7", {nccl.KEEP_PLUGIN: "1"}, 0),
        ("2.30.7", {}, 0),
    ],
)
def test_what_a_version_makes_of_a_plugin(monkeypatch, no_files, version, environ, told):
    monkeypatch.setattr(nccl, "installed_nccl", lambda: ("nccl", Version(version)))
    found = list(nccl.check_nccl(NcclOfNode("", "", "", "/opt/libnccl-net.so"), environ))
    assert sum(version in one.what for one in found) == told, found


EFA = Nic(kind="efa", device="rdmap64s0", port=1, state="up", state_text="ACTIVE")
HSN = replace(ETHERNET, device="hsn0", netdevs=("hsn0",), driver="cxi_ss1")
GVE = replace(ETHERNET, device="eth1", netdevs=("eth1",), driver="gve")
NO_PLUGIN = NcclOfNode(plugin_problem="no libnccl-net.so is on LD_LIBRARY_PATH")
OFI = NcclOfNode(plugin="/opt/libnccl-net.so", network="Libfabric")


@pytest.mark.parametrize(
    "nic, title, level",
    [(EFA, "EFA (AWS)", "problem"), (HSN, "Slingshot (HPE)", "problem"), (GVE, "gVNIC", "note")],
)
def test_nics_without_their_plugin_are_named_with_what_to_install(nic, title, level):
    """On Google Cloud every NIC is gVNIC, and few machines have a plugin for it."""
    (finding,) = nccl.check_nccl(NO_PLUGIN, {}, [nic, ETHERNET])
    assert (finding.level, finding.about) == (level, nic.name)
    assert finding.what.startswith(title) and "no libnccl-net.so" in finding.what
    assert "LD_LIBRARY_PATH" in finding.mend
    # Another machine's plugins are not known.
    (finding,) = nccl.check_nccl(NO_PLUGIN, {"HOLMES_SYSFS": "/tree"}, [nic, ETHERNET])
    assert finding.level == "note" and "on the node itself" in finding.mend


def test_gvnic_beside_roce_is_not_for_training():
    assert list(nccl.check_nccl(NO_PLUGIN, {}, [ROCE, GVE, ETHERNET])) == []


def test_another_networks_plugin_does_not_use_efa():
    problem, *_ = nccl.check_nccl(replace(OFI, network="gIB"), {}, [EFA])
    assert "/opt/libnccl-net.so provides 'gIB', which does not use them" in problem.what


def test_a_healthy_node_of_aws_has_no_problem():
    (finding,) = nccl.check_nccl(OFI, {}, [EFA, ETHERNET])
    assert finding.level == "note" and "network 'Libfabric'" in finding.what
    assert "of kind efa request this network by name" in finding.why


def test_advice_on_a_plugin_that_is_bypassed_names_its_network():
    (finding,) = nccl.check_nccl(replace(OFI, network="gIB"), {}, [ROCE, ETHERNET])
    assert 'net = "gIB"' in finding.mend and "export NCCL_NET=gIB" in finding.mend


def test_iwarp_is_named_with_the_setting_for_jobs_without_holmes():
    iwarp = replace(EFA, kind="iwarp", device="iwp23s0f0", skipped="iWARP")
    (finding,) = nccl.check_nccl(NcclOfNode(), {}, [iwarp, ETHERNET])
    assert finding.level == "note" and "cannot connect" in finding.what
    assert "NCCL_IB_HCA=^iwp23s0f0" in finding.mend


def test_the_network_of_efa_is_the_plugins():
    node = NodeReport("a0", "id", "eth0", (EFA, ETHERNET), nccl=OFI)
    spec = parse_spec(clusters.toml("a efa 400Gb/s a0"), "c.toml")
    for lines in (nccl.handed_over(node, None, {}), nccl.handed_over(node, spec, {})):
        assert any(line.endswith("(efa): network 'Libfabric'") for line in lines)
        assert not any("NCCL_IB_HCA" in line for line in lines)


@pytest.mark.parametrize(
    "line, expected",
    [
        ("NCCL_IB_HCA=mlx5_0", "note"),
        ("NCCL_IB_HCA=mlx5_7", "names mlx5_7, which this node does not have"),
        ('NCCL_IB_HCA="mlx5_0"', 'names "mlx5_0", which this node does not have'),
        ("NCCL_IB_HCA=mlx5_0 # both ports", None),
        ("NCCL_IB_HCA =mlx5_0", "sets a variable called 'NCCL_IB_HCA '"),
        ("export NCCL_IB_HCA=mlx5_0", "sets a variable called 'export NCCL_IB_HCA'"),
        ("NCCL_IB_HCA=mlx5_0\r", "with a blank or the end of a Windows line"),
        ("NCCL_SOCKET_IFNAME=bond7", "names bond7, which this node does not have"),
        ("NCCL_SOCKET_IFNAME=eth0", "note"),
        ("NCCL_IB_GID_INDEX=1", "is no RoCE v2 GID"),
        ("NCCL_IB_DISABLE=1", "though mlx5_0:1 can be used"),
    ],
)
def test_a_configuration_file_is_compared_with_the_nics(line, expected, no_files):
    """As the same variables in the environment are. The advice is about the file."""
    (no_files / "nccl.conf").write_text(f"{line}\n", newline="")
    roce = replace(ROCE, device="mlx5_0", netdevs=("eth1",))
    ethernet = replace(ETHERNET, device="eth0", netdevs=("eth0",), addresses=("10.0.0.1/24",))
    found = [
        finding
        for finding in nccl.check_nccl(NO_PLUGIN, {}, [roce, ethernet])
        if finding.about == str(no_files / "nccl.conf")
    ]
    if expected == "note":
        assert [finding.level for finding in found] == ["note"]
    else:
        (finding,) = found
        assert finding.level == "problem" and (expected or "mlx5_0 # both") in finding.what
        assert "line" in finding.mend or "write" in finding.mend


def test_a_configuration_file_is_not_compared_with_the_nics_of_another_machine(no_files):
    (no_files / "nccl.conf").write_text("NCCL_IB_HCA=mlx5_7\n")
    (finding,) = nccl.check_nccl(NO_PLUGIN, {"HOLMES_SYSFS": "/tree"}, [ROCE, ETHERNET])
    assert finding.level == "note"
