"""The network of every group, reductions and stage links.

They are decided from a plan and the ports of the nodes.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import random_sites
from clusters import example

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.links import Link, Links
from holmes_ext.plan.cost.model import load_model
from holmes_ext.plan.cost.reductions import SHARES
from holmes_ext.plan.decide import derive_traffic
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.maker import complete_plan, spanning, spec_of_group
from holmes_ext.plan.plan import Plan, pair_needs_group, pairs_with_group, parse_plan
from holmes_ext.plan.sizes import Sizes, groups, tied_sums
from holmes_ext.plan.traffic import NETWORK_APIS, SOCKETS, VERBS
from holmes_ext.plan.workload import Workload

EXAMPLES = Path(__file__).parents[2] / "examples"
BACKENDS = {"gloo": SOCKETS, "nccl": VERBS}
GB = 10**9


def real(*nodes, ethernet=25 * GB, **fabrics):
    """Return a site with NICs.

    nodes: (name, cluster, (fabric, address, hcas), ...) of each; fabrics by name: (kind, rate).
    """
    made = []
    for name, cluster, *ports in nodes:
        fast = [
            Port(fabric, fabric, address, ("mlx5_0:1",) if hcas else ())
            for fabric, address, hcas in ports
        ]
        made.append(Node(name, cluster, 1, (*fast, Port(ETHERNET, "eth0", "10.0.0.1"))))
    found = [Fabric(name, kind, rate, 2e-6) for name, (kind, rate) in fabrics.items()]
    return Site(tuple(made), (Fabric(ETHERNET, "ethernet", ethernet, 3e-5), *found))


@pytest.mark.parametrize("seed", range(150))
def test_every_group_of_a_random_job_goes_where_all_its_nodes_can(seed):
    """The network that is written is the one that is looked up, and the one of the plain rule.

    This holds for planned groups and for any others.
    """
    rng = random.Random(seed)
    site = random_sites.site(rng)
    made = build_plan(site, random_sites.sizes(rng, site.world_size))
    plan = parse_plan(made.to_json(), made.source)
    assert plan == made
    for backend, network_api in BACKENDS.items():
        listed = {}
        for kind, ranks in plan.groups():
            fabric = plan.fabric_of(ranks, network_api)
            wanted = random_sites.network(site, {plan.node_of(rank) for rank in ranks}, backend)
            assert (fabric.name if fabric else "local") == wanted
            listed.setdefault(kind, []).append(wanted)
        for kind, names in plan.traffic_of(network_api).transports.items():
            assert list(names) in (listed[kind], listed[kind][:1]) and set(names) == set(
                listed[kind]
            )
        for _ in range(10):
            ranks = rng.sample(range(plan.world_size), rng.randint(1, plan.world_size))
            fabric = plan.fabric_of(ranks, network_api)
            wanted = random_sites.network(site, {plan.node_of(rank) for rank in ranks}, backend)
            assert (fabric.name if fabric else "local") == wanted


@pytest.mark.parametrize("seed", range(60))
def test_stage_links_and_reductions_of_a_random_job_are_what_is_looked_up(seed):
    rng = random.Random(seed)
    site = random_sites.site(rng)
    options = Options(
        overlap=rng.choice(("auto", "on", "off")), compress_gradients=rng.choice(("off", "bf16"))
    )
    plan = build_plan(site, random_sites.sizes(rng, site.world_size), options=options)
    for network_api in NETWORK_APIS:
        traffic = plan.traffic_of(network_api)
        for ranks in groups(plan.sizes, "data") if plan.sizes else ():
            way = spec_of_group(plan, ranks, network_api, options)
            assert (
                way is traffic.reductions[plan.sizes.stage(ranks[0])]
                and way.compress == options.compress_gradients
            )
            if len(plan.by_cluster(ranks)) > 1 and way.clusters:
                assert set(plan.by_cluster(ranks)) <= set(way.clusters) and way.chunk_bytes
        pipelines = groups(plan.sizes, "pipeline") if plan.sizes else []
        for stage_link in traffic.stage_links:
            for place, ranks in enumerate(pipelines):
                pair = [ranks[stage] for stage in stage_link.stages]
                fabric, own = (
                    names[place if len(names) > 1 else 0]
                    for names in (stage_link.fabrics, stage_link.pair_groups)
                )
                used = plan.fabric_of(pair, network_api)
                assert fabric == (used.name if used else "local")
                with_group = pairs_with_group(plan, ranks, network_api)
                assert (tuple(sorted(pair)) in with_group) == ("pipeline" in own)
                assert pair_needs_group(plan, pair, range(plan.world_size), network_api) == (
                    "world" in own
                )


def test_the_plan_does_not_count_on_what_is_switched_off():
    """The plan leaves out the features in HOLMES_DISABLE.

    These are tensor ranks that cut what crosses, tied weights, stage links, overlap, and a
    hierarchical all-reduce.
    """
    nodes = tuple(
        Node(node.name, node.cluster, 2, node.ports) for node in example("two_clusters_8").nodes
    )
    site = replace(example("two_clusters_8"), nodes=nodes)
    model = replace(load_model(str(EXAMPLES / "models" / "gpt_7.5b.toml")), tied=True)
    sizes, off = (
        Sizes(2, 2, data=4),
        {
            "slices": lambda traffic: (
                max(stage_link.slices for stage_link in traffic.stage_links) > 1
            ),
            "tied": lambda traffic: bool(traffic.tied),
            "in-flight": lambda traffic: bool(traffic.in_flight),
            "overlap": lambda traffic: any(way.overlap for way in traffic.reductions),
            "compressed-activations": lambda traffic: any(
                stage_link.compression == "bf16" for stage_link in traffic.stage_links
            ),
        },
    )
    engine = EngineTraits(features={ability: (f"some-{ability}",) for ability in off})

    def traffic(options):
        return build_plan(site, sizes, model=model, options=options, engine=engine).traffic_of(
            SOCKETS
        )

    wanted = Options(overlap="on", inflight="1", compress_activations="bf16")
    for name in off:
        without = traffic(replace(wanted, off=frozenset([f"some-{name}"])))
        for other, counted in off.items():
            assert counted(traffic(wanted)) and counted(without) == (other != name), (name, other)


def test_at_equal_rates_rdma_goes_before_ethernet():
    """Site.shared_fabric said so, transport.choose took the last name of the alphabet."""
    both = [("z", "10.1.0.1", True)], [("a", "10.1.0.1", True)]
    for (port,), name in zip(both, ("z", "a")):
        site = real(
            ("n0", "c", port), ("n1", "c", port), ethernet=100 * GB, **{name: ("roce", 100 * GB)}
        )
        plan = build_plan(site)
        assert (
            {plan.fabric_of((0, 1), network_api).name for network_api in NETWORK_APIS}
            == {name}
            == {site.shared_fabric(plan.nodes).name}
        )


def test_gloo_needs_an_address_and_nccl_an_hca_on_every_member():
    ports = ("ib", "10.1.0.1", True), ("ib", "", True)
    plan = build_plan(
        real(("n0", "a", ports[0]), ("n1", "a", ports[1]), ib=("ib", 200 * GB)), Sizes(2)
    )
    assert plan.traffic_of(VERBS).transports["pipeline"] == ("ib",) == plan.transports["world"]
    assert plan.traffic_of(SOCKETS).transports["pipeline"] == ("ethernet",)
    assert len(plan.traffic) == 2 and parse_plan(plan.to_json(), plan.source) == plan
    without = build_plan(
        real(
            ("n0", "a", ("r", "10.1.0.1", False)),
            ("n1", "a", ("r", "10.1.0.2", True)),
            r=("roce", 200 * GB),
        )
    )
    assert (
        without.fabric_of((0, 1), SOCKETS).name == "r"
        and without.fabric_of((0, 1), VERBS).name == "ethernet"
    )


def test_a_plan_made_before_the_job_is_settled_for_the_ports_that_there_are():
    """plan.json of cluster.toml alone, on nodes one of which has no IPoIB, and whose NIC fails later."""
    site = real(
        ("n0", "a", ("a", "10.1.0.1", True)),
        ("n1", "a", ("a", "", True)),
        ("n2", "b", ("b", "10.2.0.1", True)),
        ("n3", "b", ("b", "10.2.0.2", True)),
        a=("ib", 200 * GB),
        b=("roce", 100 * GB),
    )
    bare = replace(
        site,
        nodes=tuple(replace(n, ports=tuple(Port(p.fabric) for p in n.ports)) for n in site.nodes),
    )
    planned = build_plan(bare, Sizes(2))
    assert all(
        planned.traffic_of(network_api).transports["data"] == ("a", "b")
        for network_api in NETWORK_APIS
    )
    job = derive_traffic(parse_plan(planned.to_json(), "p.json"), site)
    assert job.traffic_of(VERBS).transports["data"] == ("a", "b") and job.traffic_of(
        SOCKETS
    ).transports["data"] == ("ethernet", "b")
    assert derive_traffic(job, site) == job and job.workload == planned.workload
    later = derive_traffic(job, site.without({("n3", "b"): "no link"}))
    assert later.transports["data"] == ("a", "ethernet") and later.nodes == job.nodes
    assert [(s.kind, s.groups) for s in later.spanning] == [("data", 1)] and not job.spanning


def test_a_new_plan_gets_what_it_lacks():
    site = example()
    bare = Plan(site.digest, ("a0", "a1", "b0", "b1"), 1, Sizes(2).complete(4))
    assert bare.transports == {} and derive_traffic(bare, site).transports["data"] == ("a", "b")
    work = Workload(gradient_bytes=1.0)
    assert derive_traffic(bare, site, workload=work, basis="m.toml").workload == work


def test_networks_are_as_measured():
    site = example()
    crawling = Links({"a": Link.of(replace(site.fabric_by_name["a"], rate_bps=10**6))})
    plan = build_plan(site, Sizes(2), links=crawling)
    assert plan.fabrics[-1].name == "a" and set(plan.transports["data"]) == {"ethernet", "b"}


# --------------------------------------------------------------------------- reductions


def test_whose_reduction_is_waited_for_depends_on_the_model():
    site, sizes = example(), Sizes(2).complete(4)
    quick = Workload(forward_s=1.0, backward_s=2.0, gradient_bytes=1e8)
    plan = build_plan(site, sizes, quick)
    assert [way.overlap for way in plan.traffic_of().reductions] == [True, False]
    assert [way.overlap for way in build_plan(site, sizes).traffic_of().reductions] == [True, True]
    for option, wanted in (("on", [True, True]), ("off", [False, False])):
        settled = derive_traffic(plan, site, Options(overlap=option))
        assert [way.overlap for way in settled.traffic_of().reductions] == wanted
    assert not any(
        way.overlap
        for way in build_plan(site, Sizes(4), options=Options(overlap="on")).traffic_of().reductions
    )


def test_other_sizes_are_decided_with_the_plans_own_numbers():
    site, quick = example(), Workload(forward_s=1.0, backward_s=2.0, gradient_bytes=1e8)
    plan = build_plan(site, None, quick, basis="mine")
    other = complete_plan(plan, Sizes(2).complete(4), Options())
    assert [way.overlap for way in other.traffic_of().reductions] == [True, False]
    assert other.nodes == plan.nodes and other.transports["data"] == ("a", "b")
    model = replace(load_model(EXAMPLES / "models" / "deepspeed_demo.toml"), source="model")
    known = complete_plan(plan, Sizes(2).complete(4), Options(), model)
    assert known.workload == model.workload(Sizes(2).complete(4))


def test_large_sums_over_unequal_clusters_go_hierarchically_over_sockets_only():
    plan = build_plan(example("two_clusters_3_5"))
    everyone = tuple(range(8))
    assert (
        spec_of_group(plan, everyone, SOCKETS, Options()).clusters
        and not spec_of_group(plan, everyone, VERBS, Options()).clusters
    )
    even = build_plan(example("two_clusters_8"))
    assert spec_of_group(even, everyone, VERBS, Options()).clusters == ("a", "b")
    assert spec_of_group(even, (0, 1, 2), SOCKETS, Options()).clusters == ()


def test_hierarchical_where_a_group_spans_and_the_link_is_slow():
    nodes = [
        (f"n{i}", cluster, (cluster, "10.1.0.1", True))
        for i, cluster in enumerate(("r", "i", "r", "i"))
    ]
    for ethernet, clusters in ((GB // 4, ("r", "i")), (200 * GB, ())):
        site = real(*nodes, ethernet=ethernet, i=("ib", 2 * GB), r=("roce", 2 * GB))
        plan = derive_traffic(Plan(site.digest, ("n0", "n1", "n2", "n3"), 1), site)
        assert spec_of_group(plan, (0, 1, 2, 3), SOCKETS, Options()).clusters == clusters
        assert list(plan.by_cluster((0, 1, 2, 3)).values()) == [[0, 2], [1, 3]]
        assert spec_of_group(plan, (0, 2), SOCKETS, Options()).clusters == ()  # one cluster
        # one node of each: as many bytes cross
        assert spec_of_group(plan, (0, 1), SOCKETS, Options()).clusters == ()


def test_a_group_that_is_not_planned_follows_the_same_rules():
    plan = build_plan(example("two_clusters_8"), Sizes(2))
    inside, across = (
        spec_of_group(plan, (0, 1), SOCKETS, Options()),
        spec_of_group(plan, (0, 1, 4, 5), SOCKETS, Options()),
    )
    assert (
        inside.clusters == ()
        and across.clusters == ("a", "b")
        and across.chunk_bytes == 2 * 512 * 2**10
    )


def test_a_bucket_is_the_networks_the_users_or_an_eighth_of_little():
    plan = build_plan(example(), Sizes(2))
    assert spec_of_group(plan, (0, 1), SOCKETS, Options()).bucket_bytes == 2**20
    assert (
        spec_of_group(plan, (0, 1), SOCKETS, Options(), total_bytes=80_000).bucket_bytes == 10_000
    )
    given = build_plan(example(), Sizes(2), options=Options(bucket="2"))
    assert given.traffic_of().reductions[0].bucket_bytes == 2_000_000


def test_what_compression_leaves_is_what_the_codecs_say():
    compress = pytest.importorskip("holmes_ext.runtime.compress")
    for kind, share in SHARES.items():
        codec = compress.codec(kind)
        assert share == (codec.share if codec is not None else 1.0)


def test_spanning_groups_are_those_whose_members_have_better():
    site = example()
    good, turn = (
        derive_traffic(Plan(site.digest, nodes, 1), site)
        for nodes in (("a0", "a1", "b0", "b1"), ("a0", "b0", "a1", "b1"))
    )
    sizes = Sizes(2).complete(4)
    assert spanning(good, sizes) == {} and spanning(turn, sizes) == {"data": 2}
    assert (
        spanning(good, Sizes(data=4)) == {"data": 1}
        and spanning(good, Sizes(data=4), instances=2) == {}
    )
    ethernet = real(("n0", "a"), ("n1", "b"))
    assert spanning(build_plan(ethernet), Sizes(data=2)) == {}


@pytest.mark.parametrize(
    "sizes, slices",
    [(Sizes(2, tensor=2), 2), (Sizes(2), 1), (Sizes(4, tensor=4), 4), (Sizes(2, tensor=16), 1)],
)
def test_tensor_ranks_share_out_what_crosses(sizes, slices):
    """Where each lies in a node; inside a cluster, and where sequence parallelism cuts it, nothing is cut."""
    site = example("paper_4_roce_4_ib")
    for network_api in NETWORK_APIS:
        stage_links = build_plan(site, sizes).traffic_of(network_api).stage_links
        for stage_link in stage_links:
            assert stage_link.slices == (slices if ETHERNET in stage_link.fabrics else 1), (
                stage_link
            )
        assert any(ETHERNET in stage_link.fabrics for stage_link in stage_links)
    cut = build_plan(site, sizes, replace(Workload(), copies=1))
    assert all(stage_link.slices == 1 for stage_link in cut.traffic_of(SOCKETS).stage_links)


def test_tied_weights_are_summed_hierarchically_where_each_stage_has_a_cluster():
    plan = build_plan(example("two_clusters_8"), Sizes(2))
    for network_api in NETWORK_APIS:
        assert set(plan.traffic_of(network_api).tied.clusters) == {"a", "b"}
    assert tied_sums(plan.sizes) == [(0, 4, 1, 5, 2, 6, 3, 7)]
    for sizes in (Sizes(), Sizes(8)):  # one stage; one data-parallel rank
        assert build_plan(example("two_clusters_8"), sizes).traffic_of(SOCKETS).tied is None
    with_tensor = build_plan(example("paper_4_roce_4_ib"), Sizes(2, tensor=2))
    assert len(tied_sums(with_tensor.sizes)) == 2 and with_tensor.traffic_of(VERBS).tied
