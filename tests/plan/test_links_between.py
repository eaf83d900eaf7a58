"""Uplinks and links between clusters in prices, simulation, decisions and placement."""

import itertools
from dataclasses import replace

import pytest
from clusters import spec, toml

from holmes_ext.cluster.measured import MeasuredPair
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec, parse_spec
from holmes_ext.lab.samples import examples
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.across import Across, neighbours
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model_file import load_model
from holmes_ext.plan.cost.network_old import Price, all_reduce, crossing, message, summed_across, two_levels
from holmes_ext.plan.cost.nodes import Predictor, step_seconds
from holmes_ext.plan.cost.workload import Workload
from holmes_ext.plan.layout import Layout
from holmes_ext.plan.place_old import place
from holmes_ext.plan.plan import load_plan
from holmes_ext.plan.search import arrangement
from holmes_ext.plan.search.arrangement import Ground
from holmes_ext.plan.search.search import search
from holmes_ext.plan.search.space import Limits
from holmes_ext.plan.simulate.execution import Execution
from holmes_ext.plan.simulate.step import simulate
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import SOCKETS, VERBS

LINKS = """
[[between]]
clusters = ["a", "b"]
rate = "{rate}"
latency = "{latency}"
"""
MODEL = load_model(examples() / "models" / "deepspeed_demo.toml")


def two(rate="50Mb/s", latency="20ms", uplink="", nodes="a[0-1]"):
    more = f" uplink={uplink}" if uplink else ""
    text = toml(f"a ib 2Gb/s {nodes}{more}", f"b roce 2Gb/s {nodes.replace('a', 'b')}")
    return site_from_spec(parse_spec(text + (LINKS.format(rate=rate, latency=latency) if rate else "")))


def names(site):
    return [node.name for node in site.nodes]


def test_ring_pays_the_slowest_it_passes_and_each_latency_twice():
    site = two()
    ethernet = site.fabric_by_name["ethernet"]
    ways = crossing(site.wan, neighbours(["a", "a", "b", "b"]))
    price = all_reduce(4, ethernet, 1, ways)
    assert price.byte_s == pytest.approx(1.5 * 8 / 50e6)
    assert price.latency_s == pytest.approx(2 * (20e-3 + 20e-3 + 30e-6))  # round the ring twice but for one hop
    assert all_reduce(4, ethernet, 1, crossing(site.wan, neighbours(list("abab")))).byte_s == pytest.approx(
        2 * price.byte_s)  # nodes in turn: two neighbours share each direction
    assert all_reduce(4, ethernet) == all_reduce(4, ethernet, 1, crossing(two(rate="").wan, []))


def test_an_uplink_is_shared_by_all_that_leave():
    site = two(rate="", uplink="100Mb/s")
    (way,) = crossing(site.wan, [("a", "b")], flows=4)
    assert message(site.fabric_by_name["ethernet"], 1, way=way).byte_s == pytest.approx(8 * 4 / 100e6)


@pytest.mark.parametrize("engine, uplink, small", [("megatron", "", 5), ("megatron", "60Mb/s", 5), ("deepspeed", "", 2),
                                                   ("async", "", 0)])
def test_closed_form_and_simulation_agree_on_one_crossing(engine, uplink, small):
    """Two stages on two clusters, computing nothing to speak of: both are what the link lets through."""
    site = two(uplink=uplink)
    model = replace(MODEL, micro_batches=1, gpu=replace(MODEL.gpu, flops=1e15))
    run = Execution(engine=engine, parameter_s=0.0)
    step = simulate(site, names(site), Sizes(pipeline=2), model, run)
    flat = simulate(two(rate="", latency=""), names(site), Sizes(pipeline=2), model, run)
    size = model.layers_of(Sizes(pipeline=2).complete(4))[0].activation_bytes
    # there and back, two ranks' activations share the link; that the first is waited for must be known to its sender
    wanted = 0.02 + 2 * (0.02 + 2 * 8 * size / 50e6)
    inside = max(s.end - s.start for line in step.ranks for s in line.spans if s.kind == "reduce" and not s.across)
    # megatron-core's norm goes there and back, both engines' loss back, once those who wait for them are known to
    wanted += small * 0.02
    assert step.step_s - inside == pytest.approx(wanted, rel=0.02) and flat.step_s < step.step_s
    assert step.carried["between", "a", "b"] == pytest.approx(2 * size)


def test_simulated_ring_over_the_link():
    site = two()
    model = replace(MODEL, micro_batches=1, gpu=replace(MODEL.gpu, flops=1e15))
    step = simulate(site, names(site), Sizes(pipeline=1), model, Execution(engine="megatron", parameter_s=0.0))
    gradients = sum(sum(layer.reduced(4, 1)) for layer in model.layers_of(Sizes().complete(4))) * model.gradient_width
    ways = crossing(site.wan, neighbours(["a", "a", "b", "b"]))
    assert step.step_s == pytest.approx(all_reduce(4, site.fabric_by_name["ethernet"], 1, ways).seconds(gradients),
                                        rel=0.02)


def test_two_levels_simulated_as_priced():
    site = two(nodes="a[0-1]")
    model = replace(MODEL, micro_batches=1, gpu=replace(MODEL.gpu, flops=1e15))
    run = Execution(engine="megatron", parameter_s=0.0, two_level=True, direct=True)
    flat = simulate(site, names(site), Sizes(pipeline=1), model, replace(run, two_level="off"))
    step = simulate(site, names(site), Sizes(pipeline=1), model, run)
    gradients = sum(sum(layer.reduced(4, 1)) for layer in model.layers_of(Sizes().complete(4))) * model.gradient_width
    _, price = summed_across(
        gradients, Price(8 / 2e9, 4e-6), site.fabric_by_name["ethernet"], {"a": 2, "b": 2}, 1, wan=site.wan)
    assert step.step_s == pytest.approx(price.seconds(gradients), rel=0.1)
    assert step.step_s < 0.75 * flat.step_s


THREE = load_spec(examples() / "clusters" / "three_links_6.toml")


def test_the_plan_leaves_the_slow_link_alone(tmp_path):
    site = site_from_spec(THREE)
    plan = build_plan(site, Sizes(pipeline=1), Workload(gradient_bytes=1e7))
    one = plan.traffic_of(SOCKETS).reductions[0]
    assert one.clusters == ("a", "b", "c") and one.across == Across("tree", ("b", "a", "c"), ("", "b", "b"))
    assert plan.traffic_of(VERBS).reductions[0].across is None  # NCCL goes its own way
    plan.save(tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json").traffic == plan.traffic and load_plan(tmp_path / "p.json").wan == site.wan
    compressed = build_plan(site, Sizes(pipeline=1), Workload(gradient_bytes=1e7), options=Options(compress="int8"))
    assert compressed.traffic_of(SOCKETS).reductions[0].across is None


def test_chosen_way_is_never_slower_than_the_direct_one():
    site, ethernet = site_from_spec(THREE), site_from_spec(THREE).fabric_by_name["ethernet"]
    inside, clusters = Price(8 / 1e9, 4e-6), {"a": 2, "b": 2, "c": 2}
    for size in (1e3, 1e5, 1e7, 1e9):
        way, price = summed_across(size, inside, ethernet, clusters, 1, wan=site.wan)
        direct = two_levels(inside, ethernet, clusters, 1, wan=site.wan)
        assert price.seconds(size) <= direct.sized(size).seconds(size) <= direct.seconds(size) * (1 + 1e-9)


def test_streams_fill_a_link_that_one_does_not():
    site = two(rate="100Mb/s")
    counts = []
    for stream in (0, 100_000_000, 20_000_000, 1_000_000):
        pair = MeasuredPair(("a", "b"), 100_000_000, 0.02, stream)
        plan = build_plan(site, Sizes(pipeline=1), Workload(gradient_bytes=1e7), links=Links(pairs=(pair,)))
        counts.append(plan.traffic_of(SOCKETS).reductions[0].streams)
    assert counts == [1, 1, 2, 8]  # two ranks in each cluster send: 50 Mb/s each


def test_chunks_outlast_the_latency():
    site = two(rate="1Gb/s", latency="80ms")
    ethernet, inside = site.fabric_by_name["ethernet"], Price(8 / 2e9, 4e-6)
    small = two_levels(inside, ethernet, {"a": 2, "b": 2}, 1, wan=site.wan)
    sized = small.sized(1e9)
    assert sized.chunk_bytes >= 4 * small.chunk_bytes and sized.seconds(1e9) < 0.8 * small.seconds(1e9)


def test_placement_of_eight_cities_is_the_best_of_all_orders():
    site, sizes = site_from_spec(load_spec(examples() / "clusters" / "eight_cities_64.toml")), Sizes(pipeline=8)
    placed = place(site, sizes)
    assert not placed.straddling
    predictor = Predictor(site, Layout(sizes.complete(64), 1), Workload())
    edge = {pair: predictor.edge(*((index,) * 8 for index in pair)).seconds(predictor.workload.activation_bytes)
            for pair in itertools.permutations(range(8), 2)}
    work, least = predictor.workload, None
    reduction = max(predictor.component((0,) * 8).reduction)
    for order in itertools.permutations(range(8)):
        edges = [edge[pair] for pair in itertools.pairwise(order)]
        if least is None or sum(edges) < least[0]:
            least = sum(edges), order
    shortest = predictor.breakdown([(index,) * 8 for index in least[1]]).step_s
    assert placed.predicted.step_s <= shortest * (1 + 1e-9)
    assert placed.predicted.step_s < 0.85 * step_seconds(site, names(site), sizes).step_s or reduction > work.backward_s


def test_clusters_that_do_not_fill_stages_stand_beside_good_links():
    site = site_from_spec(load_spec(examples() / "clusters" / "eight_cities_64.toml"))
    placed = place(site, Sizes(pipeline=4))
    clusters = [site.node_by_name[name].cluster for name in placed.nodes]
    assert len(list(itertools.groupby(clusters))) == 8  # no city is torn apart
    assert {frozenset(clusters[at : at + 16]) for at in (0, 16, 32, 48)} >= {frozenset(("tokyo", "seoul"))}


def test_without_sizes_clusters_stand_in_a_chain_of_their_best_links():
    chain = place(site_from_spec(THREE)).nodes
    assert [name[0] for name in chain] == list("aabbcc")


def test_the_search_knows_the_links():
    text = toml("a ib 2Gb/s a0", "b ib 2Gb/s b0", "c ib 2Gb/s c0", "d ib 2Gb/s d0", processes=2)
    slow = {frozenset("ab"), frozenset("cd"), frozenset("bd")}
    for one, two_ in itertools.combinations("abcd", 2):
        rate = "5Mb/s" if frozenset((one, two_)) in slow else "100Mb/s"
        text += f'[[between]]\nclusters = ["{one}", "{two_}"]\nrate = "{rate}"\nlatency = "5ms"\n'
    model = replace(MODEL, layers=8, global_batch=8, micro_batches=0)
    best = search(site_from_spec(parse_spec(text)), model, 8).best
    order = [group[0] for group in best.arrangement.groups]
    if len(best.arrangement.contents) == 4:
        assert not slow & {frozenset("abcd"[i] for i in pair) for pair in itertools.pairwise(order)}
    flat = search(site_from_spec(spec("a ib 2Gb/s a0", "b ib 2Gb/s b0", "c ib 2Gb/s c0", "d ib 2Gb/s d0", processes=2)),
                  model, 8).best
    assert flat.formula_s <= best.formula_s * (1 + 1e-9)


def test_no_arrangement_beats_the_bound_of_what_crosses():
    site = site_from_spec(load_spec(examples() / "clusters" / "three_links_6.toml"))
    found = search(site, load_model(examples() / "models" / "gpt_7.5b.toml"), 96, Limits({"pipeline": (3, 6)}))
    bounds = [found.pricing(one.shape).least_crossing_s() for one in found.candidates]
    assert max(bounds) > 1 and all(one.formula_s >= least for one, least in zip(found.candidates, bounds))


@pytest.mark.parametrize("together, first", [(1, ((2,), (0,), (1,))), (3, ((2, 0, 1),))])
def test_clusters_stand_in_chains_of_their_best_links_also_where_they_share_stages(together, first):
    text = toml(*(f"{name} ib 2Gb/s {name}[0-1]" for name in "abc"))
    rates = {"ab": "9Gb/s", "bc": "1Gb/s", "ac": "5Gb/s"}
    for (one, other), rate in rates.items():
        text += f'[[between]]\nclusters = ["{one}", "{other}"]\nrate = "{rate}"\nlatency = "1ms"\n'
    ground = Ground.of(site_from_spec(parse_spec(text)), MODEL)
    chains = list(arrangement._chained(ground, together))
    assert chains[0] in (first, first[::-1], tuple(group[::-1] for group in first))
    assert len(chains) == 2 + 3 // together - 1
