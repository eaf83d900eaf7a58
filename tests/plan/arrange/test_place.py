"""placement: against brute force over every distinct order of the nodes."""

import itertools
import random
from dataclasses import replace

import pytest
from clusters import example

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.across import distinct_orders, order_count
from holmes_ext.plan.arrange import place as placing
from holmes_ext.plan.arrange.place import fastest_first, pack
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel, estimate
from holmes_ext.plan.decide import spanning_groups_of
from holmes_ext.plan.engine import Rules
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.sizes import Sizes, groups
from holmes_ext.plan.workload import Workload

RATES = (2e9, 1.6e9, 0.6e9, 2e9)
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "pp-tp-cp-ep-dp", "dp-tp-cp-ep-pp", "tp-pp-cp-ep-dp")
WORK = Workload(0.03, 0.06, 8, 13e6, 4e5, 4e6, 4e6, 4e6)


def make_site(clusters, processes=1, interleave=False):
    """Return a site of these clusters.

    clusters: [(nodes, names of their fabrics beside Ethernet)]. With `interleave`, the launcher
    goes through the clusters in turn.
    """
    names = list(dict.fromkeys(fabric for _, own in clusters for fabric in own))
    fabrics = [Fabric(name, "ib", int(RATES[index % 4]), 2e-6) for index, name in enumerate(names)]
    fabrics.append(Fabric(ETHERNET, "ethernet", int(250e6), 30e-6))
    nodes = [
        (
            index,
            Node(
                f"{'abcdef'[number]}{index}",
                "abcdef"[number],
                processes,
                tuple(Port(f) for f in (*own, ETHERNET)),
            ),
        )
        for number, (count, own) in enumerate(clusters)
        for index in range(count)
    ]
    if interleave:
        nodes.sort(key=lambda item: item[0])
    return Site(tuple(node for _, node in nodes), tuple(fabrics))


def prices_of(site, sizes, work):
    return Prices(Network(site), RankModel.of_workload(work, sizes))


def place(site, sizes, work=WORK, prices=None, **options):
    sizes = sizes.complete(site.world_size)
    return placing.place(prices or prices_of(site, sizes, work), sizes, **options)


def seconds(site, order, sizes, work=WORK, prices=None):
    """Of a step with the nodes in this order."""
    sizes = sizes.complete(site.world_size)
    prices = prices or prices_of(site, sizes, work)
    costs = prices.costs(prices.network.placement(order, sizes))
    return estimate(costs, (1,) * sizes.pipeline).step_s


def plain(*counts, **options):
    """Clusters of these many nodes, each with a fabric of its own."""
    return make_site([(count, (f"f{index}",)) for index, count in enumerate(counts)], **options)


def spanning(site, order, sizes):
    """Return whether any group of `order` falls to Ethernet though one of its nodes has better.

    This follows the definition, group by group.
    """
    sizes = sizes.complete(site.world_size)
    for kind in ("data", "tensor", "context", "expert"):
        for group in groups(sizes, kind):
            members = {order[rank // site.processes] for rank in group}
            if len(members) == 1 or site.shared_fabric(members).name != ETHERNET:
                continue
            if any(site.shared_fabric([name]).name != ETHERNET for name in members):
                return True
    return False


def brute_force(site, sizes, prices):
    """(spans, least seconds) over all distinct orders; nodes with equal fabrics are interchangeable."""
    kinds = [node.fabrics for node in site.nodes]
    best = None
    for line in distinct_orders({kind: kinds.count(kind) for kind in kinds}):
        queues = {
            kind: iter([node.name for node in site.nodes if node.fabrics == kind]) for kind in kinds
        }
        order = [next(queues[kind]) for kind in line]
        score = spanning(site, order, sizes), seconds(site, order, sizes, prices=prices)
        best = score if best is None else min(best, score)
    return best


def check(site, sizes, **options):
    prices = prices_of(site, sizes.complete(site.world_size), WORK)
    placed = place(site, sizes, prices=prices, **options)
    least = brute_force(site, sizes, prices)
    case = ([(node.name, node.fabrics) for node in site.nodes], site.processes, sizes)
    assert sorted(placed.names) == sorted(node.name for node in site.nodes), case
    assert spans_networks(site, placed) == spanning(site, placed.names, sizes) == least[0], case
    assert seconds(site, placed.names, sizes, prices=prices) == pytest.approx(least[1], rel=1e-8), (
        case
    )
    for cluster in site.clusters:  # within a cluster the launcher's order stays
        own = [node.name for node in site.nodes if node.cluster == cluster]
        assert [name for name in placed.names if name in own] == own, case


def spans_networks(site, placed):
    return prices_of(site, placed.sizes, WORK).spans_networks(placed)


def cases(limit, seed, nodes=7):
    """Random small sites and sizes: clusters, processes, order, pipeline, tensor, context, expert."""
    rng = random.Random(seed)
    found = 0
    while found < limit:
        counts = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        processes = rng.choice((1, 2, 3, 4))
        world = sum(counts) * processes
        pipeline, tensor, context = (
            rng.choice((1, 2, 3, 4, 6)),
            rng.choice((1, 2, 4)),
            rng.choice((1, 1, 2)),
        )
        if world % (pipeline * tensor * context) or sum(counts) > nodes:
            continue
        data = world // (pipeline * tensor * context)
        expert = rng.choice([size for size in (1, 1, 2, 4) if (data * context) % size == 0])
        found += 1
        yield (
            counts,
            processes,
            Sizes(pipeline, tensor, context, expert, order=rng.choice(ORDERS)),
            rng.random() < 0.5,
        )


@pytest.mark.full(share=4)
@pytest.mark.parametrize("seed", range(4))
def test_equals_brute_force(seed):
    for counts, processes, sizes, interleave in cases(40, seed):
        check(plain(*counts, processes=processes, interleave=interleave), sizes)


@pytest.mark.full(share=4)
@pytest.mark.parametrize("pipeline", (1, 2, 3, 4, 6))
def test_equals_brute_force_for_every_split_of_six_nodes(pipeline):
    for first, second in itertools.product(range(1, 6), range(6)):
        counts = [count for count in (first, second, 6 - first - second) if count > 0]
        if sum(counts) == 6:
            for processes, order in itertools.product((1, 2), ORDERS[:2]):
                if (6 * processes) % pipeline == 0:
                    check(
                        plain(*counts, processes=processes, interleave=True),
                        Sizes(pipeline, order=order),
                    )


@pytest.mark.full(share=4)
@pytest.mark.parametrize("counts", [(2, 4), (3, 5), (1, 1, 2), (4, 4), (2, 2, 4), (1, 7)])
def test_equals_brute_force_for_the_named_shapes(counts):
    for pipeline, tensor in (
        (1, 1),
        (2, 1),
        (4, 1),
        (2, 2),
        (sum(counts) // 2, 1),
        (sum(counts), 1),
    ):
        if sum(counts) % (pipeline * tensor) == 0:
            check(plain(*counts), Sizes(pipeline, tensor))


@pytest.mark.full(share=4)
@pytest.mark.parametrize("seed", range(3))
def test_nodes_on_several_fabrics_and_shared_fabrics(seed):
    rng = random.Random(seed)
    for counts, processes, sizes, interleave in cases(25, 100 + seed):
        own = [tuple(rng.sample(("f", "g", "h"), rng.randint(0, 2))) for _ in counts]
        check(make_site(list(zip(counts, own)), processes, interleave), sizes)


def test_a_fit_group_by_group_that_no_component_has():
    """Every group may share a fabric though no fabric holds all four nodes (rails).

    Such an order is found because small sites are searched whole.
    """
    site = make_site([(1, ("p", "r")), (1, ("p", "s")), (1, ("q", "r")), (1, ("q", "s"))])
    assert pack({0: 1, 1: 1, 2: 1, 3: 1}, dict(enumerate(("pr", "ps", "qr", "qs"))), 4) is None
    check(site, Sizes(1, 2))
    assert not spans_networks(site, place(site, Sizes(1, 2)))


@pytest.mark.full(share=4)
def test_heuristic_stays_close_to_brute_force():
    """The heuristic is close to the best order, with a budget of 6 orders, as large sites get.

    Feasibility is exact. The time is near the least, and never worse than the launcher's.
    """
    worst = 1.0
    for counts, processes, sizes, interleave in cases(100, 7):
        site = plain(*counts, processes=processes, interleave=interleave)
        prices = prices_of(site, sizes.complete(site.world_size), WORK)
        placed, least = (
            place(site, sizes, prices=prices, budget=6),
            brute_force(site, sizes, prices),
        )
        assert spans_networks(site, placed) == least[0]
        step_s, launcher = seconds(site, placed.names, sizes), [node.name for node in site.nodes]
        if spanning(site, launcher, sizes) == least[0]:
            assert step_s <= seconds(site, launcher, sizes) * (1 + 1e-9)
        worst = max(worst, step_s / least[1])
    assert worst <= 1.1


@pytest.mark.parametrize("counts", [(8,), (3, 5), (1, 1, 2), (2, 4, 2)])
def test_homogeneous_nodes_are_never_reordered(counts):
    site = make_site([(count, ("shared",)) for count in counts], 2, interleave=True)
    launcher = tuple(node.name for node in site.nodes)
    assert fastest_first(Network(site)) == launcher
    for sizes in (Sizes(1), Sizes(2), Sizes(4, 2), Sizes(2, order="tp-cp-ep-pp-dp")):
        assert place(site, sizes).names == launcher


def test_slow_fabric_goes_last():
    site = make_site([(4, ("slow",)), (4, ("fast",))])
    site = Site(
        site.nodes,
        (
            Fabric("slow", "roce", int(6e8), 0.0),
            Fabric("fast", "ib", int(2e9), 0.0),
            site.fabrics[-1],
        ),
    )
    swapped = ("b0", "b1", "b2", "b3", "a0", "a1", "a2", "a3")
    assert place(site, Sizes(2)).names == swapped
    assert fastest_first(Network(site)) == swapped


def test_no_spanning_goes_before_time():
    """No group spans clusters, even if the model predicts that mixed stages are faster.

    There is nothing to reduce and much to send, and still only stage links may cross.
    """
    site = plain(2, 2, interleave=True)
    heavy = Workload(0.03, 0.06, 8, gradient_bytes=0, activation_bytes=1e8)
    placed = place(site, Sizes(2), heavy)
    assert placed.names == ("a0", "a1", "b0", "b1")
    mixed = seconds(site, ("a0", "b0", "a1", "b1"), Sizes(2), heavy)
    assert seconds(site, placed.names, Sizes(2), heavy) > mixed


def test_equal_times_keep_the_launchers_order():
    site = make_site([(2, ("slow",)), (2, ("fast",))])
    # nothing to reduce; activations cost next to nothing on either side
    free = Workload(0.03, 0.06, 8, 0.0, 0.0)
    assert place(site, Sizes(2), free).names == ("a0", "a1", "b0", "b1")


def test_issue_examples():
    for counts, pipeline in (((2, 4), 3), ((3, 5), 8), ((1, 1, 2), 4), ((2, 2, 4), 4), ((4, 4), 2)):
        site = plain(*counts, interleave=True)
        assert not spans_networks(site, place(site, Sizes(pipeline)))
    site = plain(2, 4, processes=4, interleave=True)
    assert not spans_networks(site, place(site, Sizes(3, 4)))


def test_stages_that_share_nodes_partly():
    """With 3 ranks a stage and 2 processes a node, two stages share every third node.

    So whole triples go into one cluster.
    """
    site = plain(3, 6, processes=2, interleave=True)
    assert len(Placement.of(Sizes(6).complete(18), 2, [0] * 9).components) == 3
    assert not spans_networks(site, place(site, Sizes(6)))
    site = plain(4, 5, processes=2)
    assert spans_networks(site, place(site, Sizes(6)))


def spanning_of(site, placed):
    return spanning_groups_of(prices_of(site, placed.sizes, WORK), placed)


def test_spanning_says_which_and_what_it_costs():
    site = plain(3, 5)
    placed = place(site, Sizes(2))
    (spanning,) = spanning_of(site, placed)
    assert (spanning.kind, spanning.groups, spanning.fabric) == ("data", 1, ETHERNET)
    assert {site.node_by_name[name].cluster for name in spanning.example} == {"a", "b"}
    prices = Prices(
        Network(site), RankModel.of_workload(WORK, placed.sizes), Rules(reductions=("flat",))
    )
    (flat,) = spanning_groups_of(prices, placed)
    own = replace(
        site,
        fabrics=(
            *site.fabrics[:-1],
            replace(site.fabrics[-1], rate_bps=int(RATES[1]), latency_s=2e-6),
        ),
    )
    assert flat.seconds > 0.1 and spanning.seconds <= flat.seconds
    saved = seconds(site, placed.names, Sizes(2), prices=prices)
    faster = Prices(Network(own), prices.job, prices.rules)
    assert flat.seconds == pytest.approx(
        saved - seconds(own, placed.names, Sizes(2), prices=faster), rel=0.05
    )


def test_tensor_groups_are_broken_last():
    """The mixed stage keeps its tensor pairs whole, so only data-parallel groups span.

    The stages have 4 nodes in tensor pairs.
    """
    site = plain(2, 6, interleave=True)
    placed = place(site, Sizes(2, 2))
    assert {spanning.kind for spanning in spanning_of(site, placed)} == {"data"}


def test_unknown_sizes_make_blocks():
    assert fastest_first(Network(plain(2, 2, interleave=True))) == ("a0", "a1", "b0", "b1")


def test_bad_sizes():
    with pytest.raises(HolmesError, match="does not divide the world size 8"):
        place(plain(3, 5), Sizes(3))


def test_pack_with_flexible_nodes():
    classes = dict(enumerate(("f", "fg", "g")))
    assert pack({0: 4, 2: 4}, classes, 4) == [(0,) * 4, (2,) * 4]
    for zero, one, two, size in itertools.product(range(6), range(6), range(6), (2, 3, 4)):
        if (zero + one + two) % size == 0 and zero + one + two:
            fits = any(
                (zero + give) % size == 0 and (two + one - give) % size == 0
                for give in range(one + 1)
            )
            found = pack({0: zero, 1: one, 2: two}, classes, size)
            assert (found is not None) == fits, (zero, one, two, size)
            assert (
                not fits
                or sorted(index for part in found for index in part)
                == [0] * zero + [1] * one + [2] * two
            )


def test_distinct_orders():
    counts = {"a": 3, "b": 2, "c": 1}
    orders = list(distinct_orders(counts))
    assert len(orders) == len(set(orders)) == order_count(counts) == 60
    assert orders == sorted(orders)


@pytest.mark.full(share=4)
@pytest.mark.parametrize(
    "sizes",
    [
        None,
        Sizes(16, 8),
        Sizes(1, 8),
        Sizes(16, 8, order="tp-cp-ep-pp-dp"),
        Sizes(16, 8, order="pp-tp-cp-ep-dp"),
        Sizes(64, 4, 2, 8),
        Sizes(2048, 8),
        Sizes(4, 8, 4, 4, order="tp-dp-cp-ep-pp"),
        Sizes(2, 16, 8, 2, order="dp-pp-cp-tp-ep"),
    ],
    ids=str,
)
def test_16384_gpus(sizes):
    site = example("eight_clusters_16384")
    names = place(site, sizes, Workload()).names if sizes else fastest_first(Network(site))
    assert len(set(names)) == 2048
    if sizes in (None, Sizes(16, 8), Sizes(16, 8, order="tp-cp-ep-pp-dp")):
        whole = (sizes or Sizes(16, 8)).complete(16384)
        placement = Network(site).placement(names, whole)
        assert not spans_networks(site, placement)
        stages = {whole.stage(slot * 8): name[:2] for slot, name in enumerate(names)}
        assert [stages[stage] for stage in range(0, 16, 2)] == "c0 c2 c4 c6 c1 c3 c5 c7".split()
