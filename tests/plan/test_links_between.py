"""Uplinks and links between clusters in prices, simulation, decisions and placement."""

import itertools
from dataclasses import replace

import pytest
from clusters import spec, toml
from prices import step_seconds, sums_on_site

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec, parse_spec
from holmes_ext.cluster.wan import MeasuredPair
from holmes_ext.options import Options
from holmes_ext.patches.deepspeed.features import DEEPSPEED
from holmes_ext.patches.megatron.features import MEGATRON
from holmes_ext.patches.torch.features import LOOP
from holmes_ext.plan.arrange.orders import Orders
from holmes_ext.plan.arrange.place import fastest_first
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import load_model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel
from holmes_ext.plan.plan import load_plan, parse_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import SOCKETS, VERBS, CrossClusterAlgorithm
from holmes_ext.plan.workload import Workload
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.space import Limits
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate
from holmes_ext.samples import examples

LINKS = """
[[between]]
clusters = ["{one}", "{other}"]
rate = "{rate}"
latency = "{latency}"
"""
MODEL = load_model(examples() / "models" / "deepspeed_demo.toml")


def two(rate="50Mb/s", latency="20ms", uplink="", nodes="a[0-1]"):
    more = f" uplink={uplink}" if uplink else ""
    text = toml(f"a ib 2Gb/s {nodes}{more}", f"b roce 2Gb/s {nodes.replace('a', 'b')}")
    link = LINKS.format(one="a", other="b", rate=rate, latency=latency) if rate else ""
    return site_from_spec(parse_spec(text + link))


def names(site):
    return [node.name for node in site.nodes]


def test_ring_pays_the_slowest_it_passes_and_each_latency_twice():
    site = two()
    price = sums_on_site(site).flat.once
    assert price.byte_s == pytest.approx(1.5 * 8 / 50e6)
    # round the ring twice but for one hop
    assert price.latency_s == pytest.approx(2 * (20e-3 + 20e-3 + 30e-6))
    in_turn = sums_on_site(site, ["a0", "b0", "a1", "b1"]).flat.once
    assert in_turn.byte_s == pytest.approx(2 * price.byte_s)  # two neighbours share each direction
    plain = sums_on_site(two(rate="")).flat.once
    assert plain.byte_s == pytest.approx(1.5 * 8 / 250e6) and plain.latency_s == pytest.approx(
        6 * 30e-6
    )


def test_an_uplink_is_shared_by_all_that_leave():
    site = two(rate="", uplink="100Mb/s", nodes="a[0-3]")
    network, sizes = Network(site), Sizes(pipeline=2).complete(8)
    prices = Prices(network, RankModel.of_workload(Workload(), sizes))
    (stage_link,) = prices.stage_links(network.placement(names(site), sizes))
    assert stage_link.byte_s == pytest.approx(8 * 4 / 100e6)


@pytest.mark.parametrize(
    "engine, uplink, small",
    [(MEGATRON, "", 5), (MEGATRON, "60Mb/s", 5), (DEEPSPEED, "", 2), (LOOP, "", 0)],
)
def test_closed_form_and_simulation_agree_on_one_crossing(engine, uplink, small):
    """Two stages on two clusters, computing nothing to speak of: both are what the link lets through."""
    site = two(uplink=uplink)
    model = replace(MODEL, micro_batches=1, gpu=replace(MODEL.gpu, flops=1e15))
    run = Execution(engine=engine, parameter_s=0.0)
    step = simulate(site, names(site), Sizes(pipeline=2), model, run)
    flat = simulate(two(rate="", latency=""), names(site), Sizes(pipeline=2), model, run)
    size = model.layers_of(Sizes(pipeline=2).complete(4))[0].activation_bytes
    # there and back, two ranks' activations share the link; that the first is waited for must be known to its
    # sender
    wanted = 0.02 + 2 * (0.02 + 2 * 8 * size / 50e6)
    inside = max(
        s.end - s.start
        for line in step.ranks
        for s in line.spans
        if s.kind == "reduce" and not s.across
    )
    # megatron-core's norm goes there and back, both engines' loss back, once those who wait for them are
    # known to
    wanted += small * 0.02
    assert step.step_s - inside == pytest.approx(wanted, rel=0.02) and flat.step_s < step.step_s
    assert step.carried["between", "a", "b"] == pytest.approx(2 * size)


def test_simulated_ring_over_the_link():
    site = two()
    model = replace(MODEL, micro_batches=1, gpu=replace(MODEL.gpu, flops=1e15))
    step = simulate(
        site, names(site), Sizes(pipeline=1), model, Execution(engine=MEGATRON, parameter_s=0.0)
    )
    gradients = (
        sum(sum(layer.reduced(4, 1)) for layer in model.layers_of(Sizes().complete(4)))
        * model.gradient_width
    )
    assert step.step_s == pytest.approx(sums_on_site(site).flat.seconds(gradients), rel=0.02)


def test_hierarchical_simulated_as_priced():
    site = two(nodes="a[0-1]")
    model = replace(MODEL, micro_batches=1, gpu=replace(MODEL.gpu, flops=1e15))
    run = Execution(engine=MEGATRON, parameter_s=0.0, hierarchical=True, direct=True)
    flat = simulate(site, names(site), Sizes(pipeline=1), model, replace(run, hierarchical=False))
    step = simulate(site, names(site), Sizes(pipeline=1), model, run)
    gradients = (
        sum(sum(layer.reduced(4, 1)) for layer in model.layers_of(Sizes().complete(4)))
        * model.gradient_width
    )
    both = sums_on_site(site, size=gradients).hierarchical
    assert step.step_s == pytest.approx(both.seconds(gradients), rel=0.1)
    assert step.step_s < 0.75 * flat.step_s


THREE = load_spec(examples() / "clusters" / "three_links_6.toml")


def test_the_plan_leaves_the_slow_link_alone(tmp_path):
    site = site_from_spec(THREE)
    plan = build_plan(site, Sizes(pipeline=1), Workload(gradient_bytes=1e7))
    one = plan.traffic_of(SOCKETS).reductions[0]
    tree = CrossClusterAlgorithm("tree", ("b", "a", "c"), ("", "b", "b"))
    assert one.clusters == ("a", "b", "c") and one.across == tree
    assert plan.traffic_of(VERBS).reductions[0].across is None  # NCCL goes its own way
    plan.save(tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json").wan == site.wan
    assert parse_plan(plan.to_json(), "p.json").traffic == plan.traffic
    compressed = build_plan(
        site,
        Sizes(pipeline=1),
        Workload(gradient_bytes=1e7),
        options=Options(compress_gradients="int8"),
    )
    assert compressed.traffic_of(SOCKETS).reductions[0].across is None


def test_chosen_route_is_never_slower_than_the_direct_one():
    site = site_from_spec(THREE)
    # of given chunks: nothing is sized
    direct = sums_on_site(site, size=1.0, bucket_bytes=2 * 512 * 2**10).hierarchical
    for size in (1e3, 1e5, 1e7, 1e9):
        chosen = sums_on_site(site, size=size).hierarchical
        assert (
            chosen.seconds(size)
            <= direct.with_best_chunks(size).seconds(size)
            <= direct.seconds(size) * (1 + 1e-9)
        )


def test_streams_fill_a_link_that_one_does_not():
    site = two(rate="100Mb/s")
    counts = []
    for stream in (0, 100_000_000, 20_000_000, 1_000_000):
        pair = MeasuredPair(("a", "b"), 100_000_000, 0.02, stream)
        plan = build_plan(
            site, Sizes(pipeline=1), Workload(gradient_bytes=1e7), links=Links(pairs=(pair,))
        )
        counts.append(plan.traffic_of(SOCKETS).reductions[0].streams)
    assert counts == [1, 1, 2, 8]  # two ranks in each cluster send: 50 Mb/s each


def test_chunks_outlast_the_latency():
    """Of an exchange that stalls: a chunk must have arrived before the next one leaves."""
    small = replace(sums_on_site(two(rate="1Gb/s", latency="80ms")).hierarchical, stalls=True)
    sized = small.with_best_chunks(1e9)
    assert sized.chunk_bytes >= 4 * small.chunk_bytes and sized.seconds(1e9) < 0.8 * small.seconds(
        1e9
    )


def chain(near="200Mb/s", far="10Mb/s"):
    """Five clusters in a row: what is not next to each other is far."""
    lines = [f"{name} roce 1Gb/s {name}[0-1]" for name in "abcde"]
    links = (
        LINKS.format(
            one=one, other=other, rate=near if ord(other) - ord(one) == 1 else far, latency="10ms"
        )
        for one, other in itertools.combinations("abcde", 2)
    )
    return site_from_spec(parse_spec(toml(*lines) + "".join(links)))


def test_a_chunk_that_is_passed_on_is_received_whole_first():
    site = chain()
    both = sums_on_site(site, size=2e7).hierarchical
    assert both.route.algorithm == "tree" and both.route.rounds == 2  # c is its root
    assert both.relay_byte_s == pytest.approx(8 / 200e6)  # the second of two hops
    (last,) = both.flows([both.chunk_bytes], ("reduce",), 8)
    assert [flow.wan_latency_s for flow in last] == [
        0.0,
        *2 * [both.wan_latency_s + both.chunk_bytes * 8 / 200e6],
        0.0,
    ]
    at_once = replace(both, relay_byte_s=0.0)
    for chunks in (1, 40):
        more = both.seconds(chunks * both.chunk_bytes) - at_once.seconds(chunks * both.chunk_bytes)
        assert more == pytest.approx(2 * both.chunk_bytes * 8 / 200e6)
    # simulated chunks may stand for several: each of those waits for itself only
    (few,) = both.flows([40 * both.chunk_bytes], ("reduce",), 1)
    assert few[1].wan_latency_s == pytest.approx(last[1].wan_latency_s)
    assert (
        sums_on_site(site_from_spec(THREE), size=1e7).hierarchical.relay_byte_s == 0.0
    )  # each sends to the root


def test_the_loss_is_averaged_over_the_last_stage_s_ranks():
    site, model = two(), replace(MODEL, micro_batches=1)
    alone, averaged = (
        simulate(
            site,
            names(site),
            Sizes(pipeline=1),
            model,
            Execution(engine=replace(DEEPSPEED, averages_loss=averages)),
        )
        for averages in (False, True)
    )
    # one number down the ring of four ranks and down again: three times over the link of 20 ms
    assert averaged.step_s - alone.step_s == pytest.approx(0.06, rel=0.02)


def test_placement_of_eight_cities_is_the_best_of_all_orders():
    site, sizes = (
        site_from_spec(load_spec(examples() / "clusters" / "eight_cities_64.toml")),
        Sizes(pipeline=8),
    )
    plan = build_plan(site, sizes)
    assert not plan.spanning
    network, whole = Network(site), sizes.complete(64)
    prices = Prices(network, RankModel.of_workload(Workload(), whole))
    own = {
        city: [node.name for node in site.nodes if node.cluster == city] for city in site.clusters
    }

    def stage_links(order):
        return prices.stage_links(
            network.placement([name for city in order for name in own[city]], whole)
        )

    size, stage_link = Workload().activation_bytes, {}
    for one, two_ in itertools.permutations(site.clusters, 2):
        rest = [city for city in site.clusters if city not in (one, two_)]
        stage_link[one, two_] = stage_links([one, two_, *rest])[0].seconds(size)
    shortest = min(
        itertools.permutations(site.clusters),
        key=lambda order: sum(map(stage_link.get, itertools.pairwise(order))),
    )
    best = step_seconds(site, [name for city in shortest for name in own[city]], sizes).step_s
    placed = step_seconds(site, plan.nodes, sizes).step_s
    assert placed <= best * (1 + 1e-9)
    assert placed < 0.85 * step_seconds(site, names(site), sizes).step_s


def test_clusters_that_do_not_fill_stages_stand_beside_good_links():
    site = site_from_spec(load_spec(examples() / "clusters" / "eight_cities_64.toml"))
    plan = build_plan(site, Sizes(pipeline=4))
    clusters = [site.node_by_name[name].cluster for name in plan.nodes]
    assert len(list(itertools.groupby(clusters))) == 8  # no city is torn apart
    assert {frozenset(clusters[at : at + 16]) for at in (0, 16, 32, 48)} >= {
        frozenset(("tokyo", "seoul"))
    }


def test_without_sizes_clusters_stand_in_a_chain_of_their_best_links():
    chain = fastest_first(Network(site_from_spec(THREE)))
    assert [name[0] for name in chain] == list("aabbcc")


def test_the_search_knows_the_links():
    text = toml("a ib 2Gb/s a0", "b ib 2Gb/s b0", "c ib 2Gb/s c0", "d ib 2Gb/s d0", processes=2)
    slow = {frozenset("ab"), frozenset("cd"), frozenset("bd")}
    for one, two_ in itertools.combinations("abcd", 2):
        rate = "5Mb/s" if frozenset((one, two_)) in slow else "100Mb/s"
        text += f'[[between]]\nclusters = ["{one}", "{two_}"]\nrate = "{rate}"\nlatency = "5ms"\n'
    model = replace(MODEL, layers=8, global_batch=8, micro_batches=0)
    flat_spec = spec(
        "a ib 2Gb/s a0", "b ib 2Gb/s b0", "c ib 2Gb/s c0", "d ib 2Gb/s d0", processes=2
    )
    best, flat = (
        search(SearchResult(Network(site_from_spec(one)), model, 8), prove=False).best
        for one in (parse_spec(text), flat_spec)
    )
    contents = best.placement.stages
    if len(contents) == 4 and all(len(content) == 1 for content in contents):
        order = ["abcd"[content[0][0]] for content in contents]
        assert not slow & set(map(frozenset, itertools.pairwise(order)))
    assert flat.formula_s <= best.formula_s * (1 + 1e-9)


def test_no_placement_beats_the_bound_of_what_crosses():
    site = site_from_spec(load_spec(examples() / "clusters" / "three_links_6.toml"))
    model = load_model(examples() / "models" / "gpt_7.5b.toml")
    found = search(
        SearchResult(Network(site), model, 96, Limits({"pipeline": (3, 6)})), prove=False
    )
    bounds = [
        ShapeBound(found.network, found.prices(one.shape), one.shape).crossing_s()
        for one in found.candidates
    ]
    assert max(bounds) > 1 and all(
        one.formula_s >= least for one, least in zip(found.candidates, bounds)
    )


@pytest.mark.parametrize("together, first", [(1, ((2,), (0,), (1,))), (3, ((2, 0, 1),))])
def test_clusters_stand_in_chains_of_their_best_links_also_where_they_share_stages(together, first):
    text = toml(*(f"{name} ib 2Gb/s {name}[0-1]" for name in "abc"))
    rates = {"ab": "9Gb/s", "bc": "1Gb/s", "ac": "5Gb/s"}
    for (one, other), rate in rates.items():
        text += f'[[between]]\nclusters = ["{one}", "{other}"]\nrate = "{rate}"\nlatency = "1ms"\n'
    chains = list(
        Orders(Network(site_from_spec(parse_spec(text))), (MODEL.gpu,) * 3)._chained(together)
    )
    assert chains[0] in (first, first[::-1], tuple(group[::-1] for group in first))
    assert len(chains) == 2 + 3 // together - 1
