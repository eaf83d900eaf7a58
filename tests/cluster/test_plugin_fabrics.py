"""Fabrics of NCCL's network plugins: their keys in cluster.toml, and the network that groups request."""

from dataclasses import replace
from pathlib import Path

import clusters
import pytest

from holmes_ext.cluster.nccl import NcclOfNode, network_name, variables_of
from holmes_ext.cluster.nic import CLUSTER_KINDS, KINDS, Gid, Nic
from holmes_ext.cluster.node_report import NodeReport, nccl_remarks
from holmes_ext.cluster.plugin_fabrics import without_plugin
from holmes_ext.cluster.resolve import resolve_site, slower_than_declared
from holmes_ext.cluster.spec import load_spec, parse_spec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import SOCKETS, VERBS

INPUTS = Path(__file__).parents[1] / "inputs" / "plugin_networks"
TOML = clusters.toml("a efa 400Gb/s a[0-1]")
OFI = NcclOfNode(plugin="/opt/lib/libnccl-net.so", network="Libfabric")
OLD_OFI = replace(OFI, network="AWS Libfabric")
NONE = NcclOfNode(plugin_problem="no libnccl-net.so is on LD_LIBRARY_PATH")
GIB = replace(OFI, network="gIB")
FASTRAK = replace(OFI, network="FasTrak")
UNNAMED = replace(OFI, network="")
SHARP = replace(OFI, network="NCCL RDMA Plugin v10")


def netdev(device, address, driver, rate_bps=200 * 10**9):
    return Nic(
        kind="ethernet",
        device=device,
        netdevs=(device,),
        state="up",
        state_text="up",
        rate_bps=rate_bps,
        addresses=(address,) if address else (),
        driver=driver,
    )


def rdma(kind, device, **more):
    return Nic(
        kind=kind, device=device, port=1, state="up", state_text="ACTIVE", rate_bps=10**11, **more
    )


EFA = (rdma("efa", "rdmap64s0"), rdma("efa", "rdmap80s0"))
OPA = (rdma("opa", "hfi1_0", subnet_prefix="fec0:0000:0000:0001"),)
ERDMA_GID = Gid(1, "0000:0000:0000:0000:0000:ffff:0a02:0005", "roce_v1", "eth0")
ERDMA = (rdma("erdma", "erdma_0", addresses=("10.2.0.5/20",), gids=(ERDMA_GID,)),)
ROCE_GID = replace(ERDMA_GID, index=3, type="roce_v2")
ROCE = (rdma("roce", "mlx5_0", addresses=("10.2.0.5/20",), gids=(ROCE_GID,)),)
SLINGSHOT = (netdev("hsn0", "10.150.0.7/16", "cxi_ss1"), netdev("hsn1", "10.150.0.8/16", "cxi_ss1"))
GVNIC = (netdev("eth1", "10.1.0.2/32", "gve"), netdev("eth2", "10.2.0.2/32", "gve"))
NICS = {
    "efa": EFA,
    "slingshot": SLINGSHOT,
    "gvnic": GVNIC,
    "opa": OPA,
    "erdma": ERDMA,
    "roce": ROCE,
}


def report(name, nics, nccl=OFI, address="10.0.0.1/16", driver="ena"):
    host = netdev("eth0", address, driver, rate_bps=25 * 10**9)
    return NodeReport(name, f"id-{name}", "eth0", (*nics, host), processes=1, nccl=nccl)


def spec(kind, *more, nodes="a0,a1"):
    return parse_spec(clusters.toml(f"a {kind} 400Gb/s {nodes} " + " ".join(more)), "c.toml")


def networks_of(site):
    """Return fabric -> the network that its groups request from NCCL."""
    return {fabric.name: network_name(fabric) for fabric in site.fabrics}


# ------------------------------------------------------------------- cluster.toml


@pytest.mark.parametrize("kind", [kind for kind in CLUSTER_KINDS if kind != "ethernet"])
def test_cluster_toml_can_name_each_kind(kind):
    cluster = spec(kind).clusters[0]
    assert (cluster.kind, cluster.net) == (kind, "")
    assert cluster.latency_s == KINDS[kind].latency_s > 0


@pytest.mark.parametrize(
    "file, advice",
    [
        (
            "ethernet_net.toml",
            '\'Libfabric\' of an NCCL plugin; write kind = "efa" or kind = "slingshot"',
        ),
        (
            "silently_ignored.toml",
            "'Libfabric' of an NCCL plugin; write kind = \"efa\" and the rate",
        ),
    ],
)
def test_a_plugin_network_on_kind_ethernet_is_refused_with_what_to_write(file, advice):
    with pytest.raises(HolmesError) as caught:
        load_spec(INPUTS / file)
    assert "key 'cluster.a.net'" in str(caught.value) and advice in str(caught.value)


def test_kind_roce_on_a_node_with_efa_is_refused_with_what_to_write():
    described = load_spec(INPUTS / "roce_net.toml")
    with pytest.raises(HolmesError, match=r'no roce NIC that is up .* \(write kind = "efa"\)'):
        resolve_site([report("n1", EFA)], described)


@pytest.mark.parametrize(
    "nics, advice",
    [
        (ERDMA, '(write kind = "erdma")'),
        (SLINGSHOT, '(write kind = "slingshot")'),
        (GVNIC, '(write kind = "gvnic")'),
        ((rdma("iwarp", "iwp23s0f0", skipped="iWARP"),), 'write kind = "ethernet")'),
        ((), "to what it has"),
    ],
)
def test_a_node_without_nics_of_the_kind_is_refused_with_the_kind_that_it_has(nics, advice):
    with pytest.raises(HolmesError) as caught:
        resolve_site([report("a0", nics)], spec("roce", nodes="a0"))
    assert str(caught.value).endswith(advice)


@pytest.mark.parametrize(
    "cluster, message",
    [
        ("a ethernet - a0 net=FasTrak", "'FasTrak' of an NCCL plugin; write kind = \"gvnic\""),
        ("a ethernet - a0 net=gIB", "'gIB' of an NCCL plugin; write kind = \"roce\""),
        ("a ethernet - a0 net=Mine", "'Mine' of an NCCL plugin; write kind = \"plugin\""),
        ("a ethernet - a0 net=auto", "'auto' of an NCCL plugin; write kind = \"plugin\""),
        ("a ethernet - a0 net=Socket", "goes over NCCL's sockets; remove it"),
        ("a ethernet 400Gb/s a0 fabric=efa", "'cluster.a.fabric': .* write kind = \"efa\""),
        ("a ethernet 400Gb/s a0 fabric=fast", "'cluster.a.fabric': .* the kind of the fast NICs"),
        ("a efa 400Gb/s a0 net=IB", "NCCL's own network 'IB' cannot use NICs of kind 'efa'"),
        ("a slingshot 400Gb/s a0 net=Socket", "NCCL's own network 'Socket' cannot use"),
        ("a iwarp 100Gb/s a0", 'cannot connect over iWARP NICs.*; write kind = "ethernet"'),
        ("a omnipath 100Gb/s a0", "'omnipath' is not one of .*; did you mean 'opa'"),
        ("a tcpxo 100Gb/s a0", "'tcpxo' is not one of .*; did you mean 'gvnic'"),
        ("a libfabric 100Gb/s a0", "did you mean 'efa' or 'slingshot'"),
        ("a efa 400Gb/s a0 fabric=ethernet", "'ethernet' is the network of all nodes"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(cluster, message):
    with pytest.raises(HolmesError, match=message):
        parse_spec(clusters.toml(cluster), "c.toml")


# ------------------------------------------------------------------- networks of the fabrics


@pytest.mark.parametrize(
    "kind, nccl, network",
    [
        ("efa", OFI, "Libfabric"),
        ("efa", OLD_OFI, "AWS Libfabric"),
        ("efa", UNNAMED, ""),  # only NCCL can tell, and prefers a plugin
        ("slingshot", OFI, "Libfabric"),
        ("gvnic", FASTRAK, "FasTrak"),
        ("opa", OFI, "Libfabric"),
        ("opa", NONE, "IB"),
        ("opa", GIB, "IB"),
        ("erdma", OFI, "IB"),
        ("roce", GIB, "IB"),
        ("roce", SHARP, "IB"),
    ],
)
@pytest.mark.parametrize("declared", [True, False])
def test_the_network_is_read_from_the_installed_plugin(kind, nccl, network, declared):
    reports = [report("a0", NICS[kind], nccl), report("a1", NICS[kind], nccl)]
    if kind == "opa":
        (nic,) = OPA
        reports = [
            replace(one, nics=(replace(nic, lid=3 + n), one.nics[-1]))
            for n, one in enumerate(reports)
        ]
    site = resolve_site(reports, spec(kind) if declared else None)
    name = "a" if declared else kind
    assert networks_of(site) == {name: network, "ethernet": "Socket"}
    assert build_plan(site, Sizes()).fabric_of([0, 1], VERBS).name == name


@pytest.mark.parametrize(
    "requested, kind, nccl, network",
    [
        ("gIB", "roce", GIB, "gIB"),  # as Google's set_nccl_env.sh sets it
        ("gib", "roce", GIB, "gIB"),
        ("AWS Libfabric", "efa", OFI, "Libfabric"),
        ("Socket", "efa", OFI, "Libfabric"),
        ("IB", "roce", GIB, "IB"),
        ("gIB", "roce", NONE, "IB"),
    ],
)
def test_the_users_nccl_net_counts_for_the_network_of_the_plugin(requested, kind, nccl, network):
    nccl = replace(nccl, requested_net=requested)
    site = resolve_site([report("a0", NICS[kind], nccl), report("a1", NICS[kind], nccl)], None)
    assert networks_of(site)[kind] == network


def test_nccl_net_with_a_plugin_of_unknown_name_leaves_the_choice_to_nccl():
    """nccl-rdma-sharp-plugins decides between UCX and IBext when it starts; NCCL compares names before."""
    nccl = replace(SHARP, requested_net="UCX")
    reports = [report("a0", ROCE, nccl), report("a1", ROCE, nccl)]
    assert networks_of(resolve_site(reports, None)) == {"roce": "", "ethernet": "Socket"}


def test_nccl_net_on_ethernet_names_the_plugin_of_all_groups():
    """A plugin for plain Ethernet, such as FastSocket, is used as the user wants."""
    nccl = replace(OFI, network="FastSocket", requested_net="FastSocket")
    reports = [report("a0", (), nccl), report("a1", (), nccl)]
    assert networks_of(resolve_site(reports, None)) == {"ethernet": "FastSocket"}
    without = [reports[0], report("a1", (), replace(NONE, requested_net="FastSocket"))]
    assert networks_of(resolve_site(without, None)) == {"ethernet": "Socket"}


def test_a_plugin_that_ethernet_groups_bypass_is_named():
    reports = [report(name, (), replace(OFI, network="FastSocket")) for name in ("a0", "a1")]
    (line,) = nccl_remarks(resolve_site(reports, None), reports)
    assert line.startswith(
        "nodes a0, a1: NCCL would load /opt/lib/libnccl-net.so (network 'FastSocket')"
    )
    assert (
        "\"Socket\" is requested on fabric 'ethernet'" in line
        and "export NCCL_NET=FastSocket" in line
    )


@pytest.mark.parametrize(
    "net, nccl", [("AWS Libfabric", OFI), ("OFI", OFI), ("Libfabric", OLD_OFI)]
)
def test_each_name_of_aws_ofi_nccl_means_the_installed_one(net, nccl):
    described = parse_spec(TOML.replace('kind = "efa"', f'kind = "efa"\nnet = "{net}"'), "c.toml")
    site = resolve_site([report("a0", EFA, nccl), report("a1", EFA, nccl)], described)
    assert networks_of(site)["a"] == nccl.network


def test_kind_plugin_is_any_network():
    reports = [report(name, (), replace(OFI, network="Mine")) for name in ("a0", "a1")]
    site = resolve_site(reports, spec("plugin"))
    assert networks_of(site) == {"a": "Mine", "ethernet": "Socket"}
    plan = build_plan(site, Sizes())
    assert plan.fabric_of([0, 1], VERBS).name == "a"
    assert plan.fabric_of([0, 1], SOCKETS).name == "ethernet"


@pytest.mark.parametrize("declared", [True, False])
def test_the_hosts_own_gvnic_is_not_one_of_the_plugins(declared):
    host = netdev("eth0", "10.0.0.1/16", "gve")
    node = NodeReport("a0", "id", "eth0", (host, *GVNIC), 1, FASTRAK)
    site = resolve_site([node], spec("gvnic", nodes="a0") if declared else None)
    port = site.nodes[0].ports[0]
    assert port.hcas == ("eth1", "eth2") and port.rate_bps == 400 * 10**9


def test_plugin_nics_stay_out_of_nccl_ib_hca():
    site = resolve_site([report("a0", EFA), report("a1", EFA)], None)
    assert variables_of(site.nodes[0])["NCCL_IB_HCA"] == ""
    assert (
        slower_than_declared(resolve_site([report("a0", EFA)], spec("efa")), [report("a0", EFA)])
        == []
    )


def test_erdma_uses_verbs_with_the_gid_of_its_address():
    site = resolve_site([report("a0", ERDMA), report("a1", ERDMA)], None)
    variables = variables_of(site.nodes[0])
    assert (variables["NCCL_IB_HCA"], variables["NCCL_IB_GID_INDEX"]) == ("=erdma_0:1", "1")


# ------------------------------------------------------------------- nodes without the plugin


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("kind", ["efa", "slingshot"])
def test_groups_with_a_node_without_the_plugin_use_ethernet_and_one_line_names_it(kind, declared):
    reports = [
        report("a0", NICS[kind]),
        report("a1", NICS[kind]),
        report("a2", NICS[kind], NONE),
    ]
    site = resolve_site(reports, spec(kind, nodes="a[0-2]") if declared else None)
    name = "a" if declared else kind
    plan = build_plan(site, Sizes())
    assert plan.fabric_of([0, 1], VERBS).net == "Libfabric"
    assert plan.fabric_of([0, 2], VERBS).name == "ethernet"
    (line,) = nccl_remarks(site, reports)
    assert (
        line.startswith("node a2: NCCL cannot use ") and f"for fabric {name!r}: no libnccl" in line
    )
    (refusal,) = without_plugin(site)
    assert refusal.startswith("node a2: ")


def test_a_job_without_any_plugin_goes_over_sockets_and_one_line_names_all_nodes():
    reports = [report("a0", EFA, NONE), report("a1", EFA, NONE)]
    site = resolve_site(reports, None)
    assert networks_of(site) == {"ethernet": "Socket"}
    (line,) = nccl_remarks(site, reports)
    assert line.startswith(
        "nodes a0, a1: NCCL needs a network plugin for rdmap64s0:1, rdmap80s0:1 (EFA"
    )
    declared = resolve_site(reports, spec("efa"))
    assert build_plan(declared, Sizes()).fabric_of([0, 1], VERBS).name == "ethernet"
    (line,) = nccl_remarks(declared, reports)
    assert line.startswith("nodes a0, a1: NCCL cannot use rdmap64s0:1, rdmap80s0:1 for fabric 'a'")


def test_nics_whose_plugin_is_not_the_installed_one_are_named():
    """NVIDIA's containers have a plugin for InfiniBand, which does nothing for EFA."""
    reports = [report("a0", EFA, SHARP), report("a1", EFA, SHARP)]
    lines = nccl_remarks(resolve_site(reports, None), reports)
    assert "NCCL needs a network plugin for rdmap64s0:1, rdmap80s0:1 (EFA (AWS))" in lines[0]
    assert "is for the network 'NCCL RDMA Plugin v10'" in lines[0]


def test_gvnic_without_a_plugin_is_ethernet():
    reports = [report("a0", GVNIC, NONE), report("a1", GVNIC, NONE)]
    site = resolve_site(reports, None)
    assert networks_of(site) == {"ethernet": "Socket"} and nccl_remarks(site, reports) == []


@pytest.mark.parametrize(
    "net, nccl, reason",
    [
        ("Libfabric", GIB, "provides the network 'gIB', not 'Libfabric'"),
        ("", GIB, "provides the network 'gIB', which does not use NICs of kind efa"),
        ("", SHARP, "'NCCL RDMA Plugin v10', which does not use NICs of kind efa"),
    ],
)
def test_another_plugin_is_not_taken_for_the_right_one(net, nccl, reason):
    reports = [report("a0", EFA, nccl), report("a1", EFA, nccl)]
    site = resolve_site(reports, spec("efa", *([f"net={net}"] if net else [])))
    assert build_plan(site, Sizes()).fabric_of([0, 1], VERBS).name == "ethernet"
    assert any(reason in line for line in nccl_remarks(site, reports))


@pytest.mark.parametrize("declared", [True, False])
def test_two_versions_of_a_plugin_on_one_fabric_are_refused(declared):
    reports = [report("a0", EFA), report("a1", EFA, OLD_OFI)]
    with pytest.raises(HolmesError, match="'Libfabric' on a0; 'AWS Libfabric' on a1.*same version"):
        resolve_site(reports, spec("efa") if declared else None)


def test_nodes_in_two_subnets_need_a_cluster_toml():
    far = report("a1", EFA, address="10.1.0.1/16")
    with pytest.raises(HolmesError, match="efa NICs of nodes a0, a1 .* --holmes-cluster FILE"):
        resolve_site([report("a0", EFA), far], None)
    assert (
        resolve_site([report("a0", EFA), far], spec("efa")).fabric_by_name["a"].net == "Libfabric"
    )


def test_omni_path_with_the_default_subnet_prefix_needs_a_cluster_toml():
    (nic,) = OPA
    default = replace(nic, subnet_prefix="fe80:0000:0000:0000")
    reports = [report("a0", (replace(default, lid=1),)), report("a1", (replace(default, lid=2),))]
    with pytest.raises(
        HolmesError, match="the Omni-Path ports of 2 nodes .* default subnet prefix"
    ):
        resolve_site(reports, None)


@pytest.mark.parametrize("kind", ["efa", "slingshot", "gvnic", "plugin", "opa", "roce"])
@pytest.mark.parametrize("net", ["", "Libfabric"])
def test_in_the_lab_its_own_plugin_takes_the_place_of_any_other(kind, net):
    """The lab's plugin emulates NICs of all kinds, and calls its network "IB"."""
    nic = rdma(kind, "mlx5_0", addresses=("10.2.0.5/20",), netdevs=("fast0",))
    reports = [report(name, (nic,), NcclOfNode(network="IB")) for name in ("a0", "a1")]
    site = resolve_site(reports, spec(kind, *([f"net={net}"] if net else [])))
    assert networks_of(site) == {"a": "IB", "ethernet": "Socket"}
    assert nccl_remarks(site, reports) == []


def test_routed_erdma_needs_a_cluster_toml():
    (nic,) = ERDMA
    far = replace(nic, addresses=("10.3.0.5/20",))
    with pytest.raises(
        HolmesError, match="the erdma ports of nodes a0, a1 are each in an IP subnet"
    ):
        resolve_site([report("a0", ERDMA), report("a1", (far,))], None)


def test_nics_of_an_unknown_kind_are_used_only_where_cluster_toml_says_so():
    nic = rdma("plugin", "new0")
    reports = [report("a0", (nic,), UNNAMED), report("a1", (nic,), UNNAMED)]
    site = resolve_site(reports, None)
    assert networks_of(site) == {"ethernet": "Socket"}
    (line,) = nccl_remarks(site, reports)
    assert 'kind = "plugin"' in line
    assert networks_of(resolve_site(reports, spec("plugin")))["a"] == ""
