from dataclasses import replace

import clusters
import pytest

from holmes_ext.cluster.nccl import NcclOfNode
from holmes_ext.cluster.nic import Gid, Nic
from holmes_ext.cluster.node_report import NodeReport, nccl_remarks
from holmes_ext.cluster.resolve import (
    apart_by_subnet,
    part_of,
    rate_of_one_nic,
    resolve_site,
    slower_than_declared,
)
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import SOCKETS, VERBS

TOML = clusters.toml("a ib 200Gb/s a[0-1]", "b roce 100Gb/s b0", ethernet="25Gb/s")


def ethernet(address="10.0.0.1/16", **more):
    return Nic(
        kind="ethernet",
        device="eth0",
        netdevs=("eth0",),
        state="up",
        state_text="up",
        rate_bps=25 * 10**9,
        addresses=(address,),
        **more,
    )


def ib(prefix="fe80:0000:0000:0001", lid=1, device="mlx5_0", state="up", **more):
    values = dict(addresses=("10.1.0.1/16",), netdevs=("ib0",))
    return Nic(
        kind="ib",
        device=device,
        port=1,
        state=state,
        state_text="ACTIVE" if state == "up" else "DOWN",
        rate_bps=200 * 10**9 * (state == "up"),
        subnet_prefix=prefix,
        lid=lid,
        **{**values, **more},
    )


def roce(network="10.2.0.7/16", device="mlx5_0", **more):
    gid = Gid(3, "0000:0000:0000:0000:0000:ffff:0a02:0007", "roce_v2", "roce0")
    values = dict(netdevs=("roce0",), gids=(gid,))
    return Nic(
        kind="roce",
        device=device,
        port=1,
        state="up",
        state_text="ACTIVE",
        rate_bps=100 * 10**9,
        addresses=(network,) if network else (),
        **{**values, **more},
    )


def report(name, *nics, processes=1):
    return NodeReport(name, f"id-{name}", "eth0", (*nics, ethernet()), processes)


GOOD = (report("a0", ib(lid=1)), report("a1", ib(lid=2)), report("b0", roce()))


def spec(old="", new=""):
    assert old in TOML
    return parse_spec(TOML.replace(old, new), "c.toml")


def test_clusters_of_the_file():
    site = resolve_site(GOOD, spec())
    assert site.clusters == ("a", "b")
    a0, b0 = site.node_by_name["a0"], site.node_by_name["b0"]
    assert (a0.ports[0].interface, a0.ports[0].hcas, a0.ports[0].gid_index) == (
        "ib0",
        ("mlx5_0:1",),
        None,
    )
    assert (b0.ports[0].fabric, b0.ports[0].interface, b0.ports[0].gid_index) == ("b", "roce0", 3)
    assert a0.ports[-1].interface == "eth0"


def test_nodes_of_two_clusters_may_start_different_numbers_of_processes():
    reports = [replace(each, processes=4 if each.name == "b0" else 2) for each in GOOD]
    text = clusters.toml(
        "a ib 200Gb/s a[0-1] processes=2", "b roce 100Gb/s b0 processes=4", ethernet="25Gb/s"
    )
    with_file = resolve_site(reports, parse_spec(text))
    assert with_file.processes_of == {"a0": 2, "a1": 2, "b0": 4}
    without_file = resolve_site(reports, None)
    assert without_file.processes_of == with_file.processes_of
    assert without_file.clusters == ("ib", "roce"), "the networks tell these clusters apart"


def test_nodes_of_different_width_on_one_network_are_two_clusters_without_a_file():
    reports = [replace(GOOD[0], processes=4), replace(GOOD[1], processes=8)]
    site = resolve_site(reports, None)
    assert site.clusters == ("ib-4", "ib-8")
    assert site.shared_fabric(("a0", "a1")).name == "ib"
    # A file with one cluster says how many processes its nodes have.
    with pytest.raises(HolmesError, match="'a1' started 8"):
        resolve_site(reports, parse_spec(clusters.toml("a ib 200Gb/s a[0-1] processes=4")))


def test_the_site_has_the_digest_of_the_file_alone():
    assert resolve_site(GOOD, spec()).digest == site_from_spec(spec()).digest


def test_a_job_on_some_nodes_of_the_file():
    """It is the site that a file of these nodes alone describes."""
    links = (
        '[[between]]\nclusters = ["a", "b"]\nlatency = "1ms"\n\n[node.b0]\nethernet = '
        '"eth0"\n\n[[cluster]]'
    )
    whole = parse_spec(TOML.replace("[[cluster]]", links, 1), "c.toml")
    site, own = resolve_site(GOOD[:2], whole), part_of(whole, GOOD[:2])
    assert own.clusters == whole.clusters[:1] and not own.wan and not own.overrides
    assert [fabric.name for fabric in site.fabrics] == ["ethernet", "a"] and not site.wan
    assert site.digest == site_from_spec(own).digest != site_from_spec(whole).digest
    assert part_of(whole, GOOD) == whole
    one_of_each = [replace(GOOD[1], name="a1.example.org"), GOOD[2]]
    assert [cluster.nodes for cluster in part_of(whole, one_of_each).clusters] == [("a1",), ("b0",)]


def test_full_host_names_match_short_ones():
    site = resolve_site([replace(r, name=f"{r.name}.example.org") for r in GOOD], spec())
    assert [node.name for node in site.nodes] == ["a0", "a1", "b0"]


@pytest.mark.parametrize(
    "reports, parts",
    [
        ((*GOOD, report("c9")), ["c.toml", "node 'c9' reported but is in no cluster"]),
        (
            (*GOOD[:2], report("b0", ib())),
            ["node 'b0'", "no roce NIC that is up", "mlx5_0:1 (ib, up)"],
        ),
        ((report("a0", ib(state="down")), *GOOD[1:]), ["node 'a0'", "mlx5_0:1 is DOWN"]),
        (
            (report("a0", ib(), processes=2), *GOOD[1:]),
            ["cluster.a.processes", "is 1", "'a0' started 2"],
        ),
        ((GOOD[0], GOOD[0], GOOD[2]), ["two nodes call themselves 'a0'"]),
    ],
)
def test_reports_that_contradict_the_file(reports, parts):
    with pytest.raises(HolmesError) as error:
        resolve_site(reports, spec())
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    "old, new, parts",
    [
        ('rate = "25Gb/s"', 'rate = "25Gb/s"\ninterface = "eth7"', ["no interface 'eth7'"]),
        ('nodes = ["b0"]', 'nodes = ["b0"]\ninclude = ["mlx9*"]', ["node 'b0'", "mlx9*"]),
        ('nodes = ["b0"]', 'nodes = ["b0"]\nexclude = ["mlx5_0"]', ["node 'b0'", "no roce NIC"]),
    ],
)
def test_names_in_the_file_that_do_not_exist(old, new, parts):
    with pytest.raises(HolmesError) as error:
        resolve_site(GOOD, spec(old, new))
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_named_ethernet_without_address():
    bare = replace(
        GOOD[0], nics=(ib(), replace(ethernet(), device="eth1", netdevs=("eth1",), addresses=()))
    )
    with pytest.raises(HolmesError, match="'eth1' of node 'a0' has no address"):
        resolve_site(
            (bare, *GOOD[1:]),
            spec('nodes = ["b0"]', 'nodes = ["b0"]\n[node.a0]\nethernet = "eth1"'),
        )


def test_without_a_file_subnets_tell_the_fabrics():
    one, two = "0001:0000:0000:0000", "0002:0000:0000:0000"
    nodes = [report("x", ib(one)), report("y", ib(one)), report("z", ib(two))]
    nodes += [
        report("r", roce()),
        report("s", roce("10.2.9.9/16")),
        report("t", roce("10.3.0.1/16")),
    ]
    site = resolve_site(nodes, None)
    shared = lambda *names: site.shared_fabric(names).kind  # noqa: E731
    assert shared("x", "y") == "ib" and shared("x", "z") == "ethernet"
    assert (
        shared("r", "s") == "roce"
        and shared("s", "t") == "ethernet"
        and shared("x", "r") == "ethernet"
    )


def test_the_default_subnet_prefix_is_asked_about():
    default = "fe80:0000:0000:0000"
    with pytest.raises(HolmesError, match="default subnet prefix .* --holmes-cluster FILE"):
        resolve_site([report("x", ib(default, 1)), report("y", ib(default, 2))], None)
    with pytest.raises(HolmesError, match="both have LID 4, so there are at least two"):
        resolve_site([report("x", ib(default, 4)), report("y", ib(default, 4))], None)
    assert resolve_site([report("x", ib(default, 1)), report("y", roce())], None).world_size == 2


def test_routed_roce_is_asked_about_and_racks_are_told():
    ask = "each in an IP subnet of their own .*10.3.0.0/31.* --holmes-cluster FILE"
    with pytest.raises(HolmesError, match=ask):
        resolve_site([report("x", roce("10.3.0.0/31")), report("y", roce("10.3.0.2/31"))], None)
    rails = lambda node: [  # noqa: E731
        roce(f"10.{rail}.{node}.1/24", device=f"mlx5_{rail}") for rail in range(2)
    ]
    with pytest.raises(HolmesError, match="nodes x, y are each"):
        resolve_site([report("x", *rails(1)), report("y", *rails(2))], None)
    racks = [
        report(name, roce(f"10.{rack}.0.{at}/24"))
        for rack, at, name in ((1, 1, "r"), (1, 2, "s"), (2, 1, "t"))
    ]
    (line,) = apart_by_subnet(resolve_site(racks, None))
    assert "separate fabrics (roce-r, roce-t)" in line and "--holmes-cluster FILE" in line
    assert apart_by_subnet(resolve_site(racks[:2], None)) == []


def test_rails_count_as_one_fabric():
    rails = lambda i: [roce(f"10.{r}.0.{i}/24", device=f"mlx5_{r}") for r in range(4)]  # noqa: E731
    site = resolve_site([report("x", *rails(1)), report("y", *rails(2))], None)
    assert len(site.fabrics) == 2
    assert site.shared_fabric(["x", "y"]).rate_bps == 4 * 100 * 10**9
    assert len(site.nodes[0].ports[0].hcas) == 4


def test_roce_without_an_address_is_asked_about():
    with pytest.raises(HolmesError, match="mlx5_0:1 has no IPv4 address"):
        resolve_site([report("x", roce(""))], None)


@pytest.mark.parametrize(
    "changed, told",
    [
        ({}, []),
        ({"rate_bps": 0}, []),  # not known
        ({"rate_bps": 195 * 10**9}, []),  # rounded
        (
            {"rate_bps": 100 * 10**9},
            [("a0", "mlx5_0:1 runs at 100 Gb/s, but the rate of fabric 'a' is 200 Gb/s in c.toml")],
        ),
    ],
)
def test_a_nic_slower_than_the_file_says_is_told(changed, told):
    reports = (report("a0", replace(ib(), **changed)), *GOOD[1:])
    site = resolve_site(reports, spec())
    assert slower_than_declared(site, reports) == told
    assert site == resolve_site(GOOD, spec())  # the plan is the file's


def test_all_nics_of_a_node_count_together_and_ethernet_too():
    two = [replace(ib(), device=f"mlx5_{number}", rate_bps=50 * 10**9) for number in range(2)]
    reports = (
        NodeReport("a0.site", "id", "eth0", (*two, replace(ethernet(), rate_bps=10**9)), 1),
        *GOOD[1:],
    )
    assert slower_than_declared(resolve_site(reports, spec()), reports) == [
        (
            "a0",
            "mlx5_0:1, mlx5_1:1 run at 100 Gb/s, but the rate of fabric 'a' is 200 Gb/s in c.toml",
        ),
        ("a0", "eth0 runs at 1 Gb/s, but the rate of fabric 'ethernet' is 25 Gb/s in c.toml"),
    ]
    one = spec('nodes = ["b0"]', 'nodes = ["b0"]\n[node.a0]\nexclude = ["mlx5_1"]')
    (fast, _) = slower_than_declared(resolve_site(reports, one), reports)
    assert fast[1].startswith("mlx5_0:1 runs at 50 Gb/s")


def test_a_site_without_a_file_counts_on_what_the_nics_state():
    reports = (
        report("x", ib("0001:0000:0000:0000")),
        report("y", replace(ib("0001:0000:0000:0000"), rate_bps=10**9)),
    )
    assert slower_than_declared(resolve_site(reports, None), reports) == []


# ------------------------------------------------------------------- what NCCL makes of the NICs


def without_verbs(reports, name, why="there is no /dev/infiniband/uverbs*"):
    return tuple(replace(r, nccl=NcclOfNode(why)) if r.name == name else r for r in reports)


@pytest.mark.parametrize("cluster_file", [True, False])
def test_a_node_without_verbs_leaves_all_of_its_nccl_groups_on_sockets(cluster_file):
    """Stock NCCL falls back by itself; a group that asks for "IB" by name would crash."""
    site = resolve_site(without_verbs(GOOD, "a1"), spec() if cluster_file else None)
    plan = build_plan(site, Sizes())
    ranks = [plan.nodes.index(name) for name in ("a0", "a1")]
    assert (
        plan.fabric_of(ranks, VERBS).name == "ethernet"
        and plan.fabric_of(ranks, SOCKETS).name != "ethernet"
    )
    (line,) = nccl_remarks(site, without_verbs(GOOD, "a1"))
    assert (
        line.startswith("node a1: NCCL cannot use mlx5_0:1")
        and "uverbs" in line
        and "over sockets" in line
    )


def test_a_plugin_carries_what_cluster_toml_says():
    """Its own checks are the plugin's: without libibverbs, say."""
    named = spec('name = "a"', 'name = "a"\nnet = "UCX"')
    plugin = NcclOfNode(plugin="/opt/libnccl-net.so", network="UCX")
    without = replace(plugin, no_verbs="there is no /dev/infiniband/uverbs*")
    reports = (
        replace(GOOD[0], nccl=plugin),
        replace(GOOD[1], nccl=without),
        GOOD[2],
    )
    site = resolve_site(reports, named)
    assert site.fabric_by_name["a"].net == "UCX" and site.fabric_by_name["b"].net == ""
    fabric = build_plan(site, Sizes()).fabric_of([0, 1], VERBS)
    assert (fabric.name, fabric.net) == ("a", "UCX") and not nccl_remarks(site, reports)
    assert named.digest == spec().digest


@pytest.mark.parametrize(
    "change, message",
    [
        (('name = "a"', 'name = "a"\nnet = ""'), "cluster.a.net': '' is not a network"),
        (
            ('kind = "ib"', 'kind = "ethernet"\nnet = "UCX"'),
            'cluster.a.net\': a cluster of kind \'ethernet\' has no fast NIC .* kind = "ib" or kind = "roce"',
        ),
    ],
)
def test_a_network_that_cannot_be(change, message):
    with pytest.raises(HolmesError, match=message):
        spec(*change)


def test_a_plugin_that_nccl_would_load_is_told():
    reports = tuple(replace(r, nccl=NcclOfNode(plugin="/opt/lib/libnccl-net.so")) for r in GOOD)
    on_a, on_b = nccl_remarks(resolve_site(reports, spec()), reports)
    assert (
        on_a.startswith("nodes a0, a1: NCCL would load /opt/lib/libnccl-net.so") and "net =" in on_a
    )
    assert on_b.startswith("node b0: ")


def test_rails_with_unlike_gid_tables_leave_the_index_to_nccl():
    other = Gid(5, "0000:0000:0000:0000:0000:ffff:0a02:0008", "roce_v2", "roce1")
    rails = roce(), roce(device="mlx5_1", netdevs=("roce1",), gids=(other,))
    reports = (*GOOD[:2], report("b0", *rails))
    site = resolve_site(reports, spec())
    assert (
        site.node_by_name["b0"].ports[0].gid_index is None
        and len(site.node_by_name["b0"].ports[0].hcas) == 2
    )
    (line,) = nccl_remarks(site, reports)
    assert "mlx5_0:1 3, mlx5_1:1 5" in line and "2.21" in line


def test_a_node_with_infiniband_and_roce_uses_one_of_them():
    """NCCL_IB_HCA is one list for a process: a group on RoCE could be given the InfiniBand port."""
    both = tuple(
        report(f"n{i}", ib(lid=i + 1, prefix="fe80:0000:0000:0007"), roce(device="mlx5_9"))
        for i in (0, 1)
    )
    reports = (*both, report("n2", roce()))
    site = resolve_site(reports, None)
    for name in ("n0", "n1"):
        used = [port for port in site.node_by_name[name].ports if port.hcas and not port.no_verbs]
        assert [port.hcas for port in used] == [("mlx5_0:1",)]
    plan = build_plan(site, Sizes())
    ranks = {name: plan.nodes.index(name) for name in ("n0", "n1", "n2")}
    assert plan.fabric_of([ranks["n0"], ranks["n1"]], VERBS).kind == "ib"
    assert plan.fabric_of([ranks["n0"], ranks["n2"]], VERBS).name == "ethernet"
    assert plan.fabric_of([ranks["n0"], ranks["n2"]], SOCKETS).kind == "roce"
    (line,) = nccl_remarks(site, reports)
    assert line.startswith("nodes n0, n1: NCCL cannot use mlx5_9:1") and "one fabric" in line


def test_alone_on_its_infiniband_a_node_uses_what_it_shares():
    reports = (report("n0", ib(), roce(device="mlx5_9")), report("n1", roce()))
    site = resolve_site(reports, None)
    assert build_plan(site, Sizes()).fabric_of([0, 1], VERBS).kind == "roce"


def test_a_clusters_name_without_a_file_is_no_net_devices():
    reports = [
        report(f"n{i}", ib(lid=i + 1, prefix=f"fe80:0000:0000:000{1 + i // 2}")) for i in range(4)
    ]
    assert resolve_site([*reports, report("r0", roce())], None).clusters == (
        "ib-n0",
        "ib-n2",
        "roce",
    )


def test_a_rate_that_is_one_nics_of_several():
    """The file's rates are of a whole node; 200 Gb/s for two HCAs of 200 Gb/s each is one HCA's."""
    two = report("a0", ib(), ib(device="mlx5_1"))
    site = resolve_site([two, *GOOD[1:]], spec())
    (text,) = rate_of_one_nic(site, two)
    assert (
        "2 fast NICs run at 400 Gb/s together, but the rate of fabric 'a' is 200 Gb/s in c.toml"
        in text
    )
    assert rate_of_one_nic(resolve_site(GOOD, spec()), GOOD[0]) == []
    assert rate_of_one_nic(resolve_site([two, *GOOD[1:]], spec("200Gb/s", "400Gb/s")), two) == []
