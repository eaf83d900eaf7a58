"""planner/simulate/ and plan/cost/links.py: closed forms, the analytic model, properties."""

import itertools
from dataclasses import replace

import clusters
import pytest
from prices import costs_on_site

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import DEEPSPEED
from holmes_ext.patches.megatron.features import MEGATRON
from holmes_ext.patches.torch.features import DDP, LOOP
from holmes_ext.plan import placement as folds
from holmes_ext.plan.cost.links import Curve, Link, Links, fit
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network, stock_fabric
from holmes_ext.plan.cost.stages import StageCosts, estimate, predict
from holmes_ext.plan.engine import AWAITED
from holmes_ext.plan.placement import Fold
from holmes_ext.plan.schedule import passes
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.events import Simulation, Transfer
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.schedules import schedule
from holmes_ext.planner.simulate.step import simulate

EXAMPLES = __file__.rsplit("/", 4)[0] + "/examples"


def one_node(processes):
    """Return a site without any network traffic."""
    return clusters.site(f"a ethernet - a0 processes={processes}", ethernet="1Gb/s")


def two_clusters(a=2, b=2, processes=1, ethernet="1Gb/s", fast="10Gb/s"):
    nodes = f"a ib {fast} a[0-{a - 1}]", f"b roce {fast} b[0-{b - 1}]"
    return clusters.site(*nodes, ethernet=ethernet, processes=processes)


def model(layers=8, micro_batches=8, **more):
    return Model(
        **{
            **dict(
                layers=layers,
                hidden=256,
                heads=4,
                sequence=128,
                vocabulary=256,
                micro_batches=micro_batches,
                tied=False,
                gpu=Gpu(1e12),
            ),
            **more,
        }
    )


def flat_costs(stages, layers, micro_batches, forward=1.0, backward=2.0):
    rows = lambda value: ((0.0, *[value] * layers, 0.0),) * stages  # noqa: E731
    return StageCosts(rows(forward), rows(backward), rows(0.0), rows(0.0), micro_batches)


def run(stages, micro_batches, engine=LOOP, virtual=1, layers_each=1, backward=2.0):
    layers = stages * virtual * layers_each
    costs = flat_costs(stages, layers, micro_batches, backward=backward)
    options = Execution(engine=engine, virtual=virtual, parameter_s=0.0)
    return simulate(
        one_node(stages),
        ["a0"],
        Sizes(pipeline=stages),
        model(layers, micro_batches),
        options,
        costs=costs,
    )


@pytest.mark.parametrize(
    "stages,micro_batches", [(1, 3), (2, 1), (2, 8), (4, 4), (4, 16), (8, 3), (8, 32)]
)
def test_without_communication_1f1b_has_its_closed_form(stages, micro_batches):
    for engine in (LOOP, MEGATRON, DEEPSPEED):
        step = run(stages, micro_batches, engine)
        assert step.step_s == pytest.approx((micro_batches + stages - 1) * 3.0), engine
        bubble = (stages - 1) / (micro_batches + stages - 1)
        assert step.causes["bubble"] / step.step_s == pytest.approx(bubble)


@pytest.mark.parametrize(
    "held, least, most",
    [
        pytest.param((), 40.0, 52.0, id="the engine waits for every send"),
        pytest.param(
            (2, 1), 4 * 9.0 + 3, 4 * 9.0 + 3, id="two of nine seconds there and back at once"
        ),
        pytest.param((3, 1), 27.0 + 3, 27.0 + 3, id="hidden but for the first and the last"),
    ],
)
def test_micro_batches_in_flight_hide_an_stage_link(held, least, most):
    """Micro-batches in flight hide a stage link of 1.5 s each way (in_flight in plan/cost/pipeline.py).

    There are two stages of 1 + 2 s and 8 micro-batches.
    """
    sizes, gpt = Sizes(pipeline=2), model(2, 8)
    bits = 8 * gpt.layers_of(sizes)[0].activation_bytes
    site = two_clusters(1, 1, ethernet=f"{round(bits / 1.5)}b/s")
    options = Execution(engine=DEEPSPEED, in_flight=held, parameter_s=0.0)
    step_s = simulate(site, ["a0", "b0"], sizes, gpt, options, costs=flat_costs(2, 2, 8)).step_s
    assert 0.999 * least <= step_s <= 1.001 * most


@pytest.mark.parametrize("notices, stage_links", [(False, 1), (True, 2)])
def test_a_receiver_s_word_waits_behind_what_it_has_just_sent(notices, stage_links):
    """With megatron-core's 1F1B over gloo, one micro-batch more takes 3 s and one stage link, or both links.

    There are two stages of 1 + 2 s and a stage link of 1.5 s. Both links come one after the other
    because the word that a stage waits follows its own message.
    """
    sizes, seconds = Sizes(pipeline=2), {}
    for count in (8, 16):
        gpt = model(2, count)
        bits = 8 * gpt.layers_of(sizes)[0].activation_bytes
        site = two_clusters(1, 1, ethernet=f"{round(bits / 1.5)}b/s")
        options = Execution(engine=MEGATRON, notices=notices, parameter_s=0.0)
        seconds[count] = simulate(
            site, ["a0", "b0"], sizes, gpt, options, costs=flat_costs(2, 2, count)
        ).step_s
    assert (seconds[16] - seconds[8]) / 8 == pytest.approx(3.0 + 1.5 * stage_links, rel=0.01)


@pytest.mark.parametrize(
    "stages,micro_batches,virtual", [(2, 4, 2), (4, 8, 2), (4, 4, 3), (4, 16, 4), (8, 16, 2)]
)
def test_interleaving_divides_the_bubble_by_the_chunks(stages, micro_batches, virtual):
    step = run(stages, micro_batches, virtual=virtual)
    work = 3.0 * micro_batches * virtual
    assert step.step_s / work - 1 == pytest.approx((stages - 1) / (virtual * micro_batches))


@pytest.mark.parametrize("stages,micro_batches,virtual", [(2, 4, 2), (4, 8, 1), (4, 6, 3)])
def test_breadth_first_has_the_same_bubble(stages, micro_batches, virtual):
    costs = flat_costs(stages, stages * virtual, micro_batches)
    step = simulate(
        one_node(stages),
        ["a0"],
        Sizes(pipeline=stages),
        model(stages * virtual, micro_batches),
        Execution(virtual=virtual, breadth_first=True, parameter_s=0.0),
        costs=costs,
    )
    assert step.step_s / (3.0 * micro_batches * virtual) - 1 == pytest.approx(
        (stages - 1) / (virtual * micro_batches)
    )


@pytest.mark.parametrize("virtual, least, most", [(4, 0.2, 0.35), (2, 0.45, 0.6)])
def test_breadth_first_hides_the_reduction_of_all_but_the_first_chunk(virtual, least, most):
    """Breadth-first passes hide the reduction of all chunks but the first.

    Pipelines of 4 nodes lie inside clusters, and replicas across. A stage's gradients cross, an
    eighth of its backward's time for each layer, of which 1F1B's last backward hides one in eight.
    """
    site, sizes = two_clusters(4, 4, ethernet="50Mb/s"), Sizes(pipeline=4, order="tp-cp-ep-pp-dp")
    gpt = model(16, 8)
    order = [node.name for node in site.nodes]
    costs = replace(flat_costs(4, 16, 8, 0.05, 0.1), micro_batches=8)

    def exposed(**options):
        options = {"engine": LOOP, "parameter_s": 0.0, "overlap": "on", **options}
        crossing, without = (
            simulate(one, order, sizes, gpt, Execution(**options), costs=costs).step_s
            for one in (site, two_clusters(4, 4, ethernet="1000Gb/s", fast="1000Gb/s"))
        )
        return crossing - without

    assert least < exposed(virtual=virtual, breadth_first=True) / exposed() < most


@pytest.mark.parametrize("virtual", [1, 2])
def test_every_micro_batch_passes_every_stage_once_and_in_order(virtual):
    for stage, stages in ((0, 4), (1, 4), (3, 4)):
        order = passes(stage, stages, 8, virtual)
        assert len(set(order)) == len(order)
        for kind in "FB":
            expected = [(kind, m, c) for m in range(8) for c in range(virtual)]
            assert sorted(unit for unit in order if unit[0] == kind) == expected
        for m, c in itertools.product(range(8), range(virtual)):
            assert order.index(("F", m, c)) < order.index(("B", m, c))


def test_1f1b_keeps_no_more_micro_batches_than_stages_are_left():
    for stage in range(4):
        alive = most = 0
        for kind, _, _ in passes(stage, 4, 16):
            alive += {"F": 1, "B": -1}[kind]
            most = max(most, alive)
        assert most == 4 - stage


def test_deepspeed_order_is_its_train_schedules():
    theirs_of = pytest.importorskip("deepspeed.runtime.pipe.schedule").TrainSchedule
    names = {
        "SendActivation": ("post", "a"),
        "RecvActivation": ("post", "a"),
        "SendGrad": ("post", "g"),
        "RecvGrad": ("post", "g"),
    }
    for micro_batches, stages in ((4, 2), (5, 3), (2, 4)):
        for stage in range(stages):
            own = [op for op in schedule(AWAITED, stage, stages, micro_batches) if op[0] != "wait"]
            theirs = []
            for commands in theirs_of(micro_batches, stages, stage).steps():
                for command in commands:
                    if command.name in names:
                        theirs.append(names[command.name])
                    elif command.name in ("ForwardPass", "BackwardPass"):
                        theirs.append(command.name[0])
            assert [(op[0], op[1][0]) if op[0] == "post" else op[0] for op in own] == theirs


@pytest.mark.parametrize(
    "ethernet,fast", [("1Gb/s", "10Gb/s"), ("100Gb/s", "100Gb/s"), ("200Mb/s", "1Gb/s")]
)
def test_agrees_with_the_analytic_model_of_1f1b(ethernet, fast):
    site, sizes, gpt = (
        two_clusters(ethernet=ethernet, fast=fast),
        Sizes(pipeline=4),
        model(gpu=Gpu(2e11)),
    )
    order = [node.name for node in site.nodes]
    for async_stage_links in (False, True):
        costs, layers = (
            costs_on_site(site, order, sizes, gpt, async_stage_links=async_stage_links),
            [2, 2, 2, 2],
        )
        held = costs.in_flight(layers)
        assert bool(held) == (
            async_stage_links and ethernet != "100Gb/s"
        )  # whose stage links are not worth it
        run = Execution(engine=LOOP, parameter_s=0.0, in_flight=held)
        step = simulate(site, order, sizes, gpt, run)
        assert step.step_s == pytest.approx(estimate(costs, layers).step_s, rel=0.1)
        assert step.step_s == pytest.approx(predict(costs, layers).step_s, rel=0.1)


def executions():
    for engine, virtual in ((DEEPSPEED, 1), (MEGATRON, 1), (MEGATRON, 2), (LOOP, 1)):
        for overlap, zero, gather in (
            ("off", 0, False),
            ("on", 0, False),
            ("first", 1, True),
            ("on", 1, False),
        ):
            levels = {"hierarchical": overlap == "on", "direct": not zero}
            yield Execution(
                engine, virtual, overlap=overlap, zero=zero, gather_overlap=gather, **levels
            )


@pytest.mark.parametrize(
    "options",
    list(executions()),
    ids=lambda o: f"{o.engine.name}-{o.virtual}-{o.overlap}-zero{o.zero}",
)
def test_properties(options):
    """Each simulation has the properties of a schedule.

    No rank overlaps itself. Spans fill the step with the bubble. Faster networks are never slower.
    Bytes are conserved.
    """
    sizes, gpt = Sizes(pipeline=2, tensor=2), model(tied=True, gpu=Gpu(2e11))
    times = []
    for ethernet in ("250Mb/s", "1Gb/s", "4Gb/s", "16Gb/s"):
        site = two_clusters(2, 2, processes=4, ethernet=ethernet)
        order = [site.nodes[index].name for index in (0, 2, 1, 3)]  # groups span the clusters
        step = simulate(site, order, sizes, gpt, options)
        times.append(step.step_s)
        for line in step.ranks:
            assert line.spans[0].start >= 0 and line.spans[-1].end <= step.step_s + 1e-9
            for one, following in zip(line.spans, line.spans[1:]):
                assert following.start >= one.end - 1e-9
        assert sum(step.causes.values()) == pytest.approx(step.step_s)
        out = sum(value for key, value in step.carried.items() if key[2] == "out")
        received = sum(value for key, value in step.carried.items() if key[2] == "in")
        assert out == pytest.approx(received) and out > 0
    assert all(later <= earlier * (1 + 1e-3) for earlier, later in zip(times, times[1:])), times


def test_bytes_of_a_step_are_those_of_its_messages():
    site, sizes, gpt = two_clusters(), Sizes(pipeline=2), model()
    order = [node.name for node in site.nodes]
    step = simulate(site, order, sizes, gpt, Execution())
    layers = gpt.costs()
    ethernet = sum(
        value
        for (_, fabric, way), value in step.carried.items()
        if fabric == "ethernet" and way == "out"
    )
    # 8 micro-batches there, their gradients back
    assert ethernet == pytest.approx(2 * 8 * layers[0].activation_bytes)
    inside = {
        fabric: value
        for (_, fabric, way), value in step.carried.items()
        if fabric != "ethernet" and way == "out"
    }
    assert inside["a"] == pytest.approx(
        4 * (layers[0].parameters + 4 * layers[1].parameters)
    )  # 2 (n - 1) / n = 1 of the gradients
    assert inside["b"] == pytest.approx(4 * (layers[-1].parameters + 4 * layers[1].parameters))


def test_pipelines_that_share_a_nic_share_its_rate():
    """With 2 and 8 data-parallel ranks on a node, the exchange takes 4 times as long.

    Each rank sends its activation. Tensor ranks share one out.
    """
    waits = {}
    for tensor, count in ((1, 2), (1, 8), (2, 2), (8, 8)):
        site = two_clusters(1, 1, processes=count, ethernet="100Mb/s")
        gpt = model(hidden=512, heads=8, gpu=Gpu(1e15))
        step = simulate(
            site, ["a0", "b0"], Sizes(pipeline=2, tensor=tensor), gpt, Execution(parameter_s=0.0)
        )
        waits[tensor, count] = step.causes["send_across"]
    assert waits[1, 8] == pytest.approx(4 * waits[1, 2], rel=0.02)
    assert (
        waits[2, 2]
        == pytest.approx(waits[8, 8], rel=0.02)
        == pytest.approx(waits[1, 2] / 2, rel=0.02)
    )


def test_pipelines_that_are_alike_are_folded():
    site = site_from_spec(load_spec(f"{EXAMPLES}/clusters/paper_4_roce_4_ib.toml"))
    order = [node.name for node in site.nodes]
    network, sizes = Network(site), Sizes(pipeline=2).complete(64)
    assert len(Fold(network.placement(order, sizes)).pipeline_classes) == 1
    mixed = [name for pair in zip(order[:4], order[4:]) for name in pair]
    pipelines = Fold(network.placement(mixed, sizes))
    assert len(pipelines.pipeline_classes) == 2 and sum(pipelines.count.values()) == 32
    assert sorted(
        rank for kind in range(2) for stage in range(2) for rank in pipelines.ranks(kind, stage)
    ) == list(range(64))


def test_folding_changes_nothing(monkeypatch):
    """Pipelines made to differ by a marker in their look: each simulated by itself, the step is the same."""
    site, sizes, gpt = two_clusters(2, 2, processes=2), Sizes(pipeline=2), model(gpu=Gpu(2e11))
    order = [node.name for node in site.nodes]
    folded = simulate(site, order, sizes, gpt, Execution(overlap="on"))
    counter = itertools.count()
    monkeypatch.setattr(folds, "_count_folded_tensor_ranks", lambda placement: 1)
    monkeypatch.setattr(
        folds, "_count_repeating_ranks", lambda placement, step: placement.stage_ranks
    )
    monkeypatch.setattr(Fold, "_signature", lambda self, node_indices: next(counter))
    single = simulate(site, order, sizes, gpt, Execution(overlap="on"))
    assert len(folded.ranks) == 2 and len(single.ranks) == 8
    assert single.step_s == pytest.approx(folded.step_s)


def test_overlap_and_hierarchical_help_where_groups_span_clusters():
    site, sizes, gpt = (
        two_clusters(4, 4, ethernet="200Mb/s", fast="4Gb/s"),
        Sizes(),
        model(micro_batches=2, hidden=512, gpu=Gpu(2e11)),
    )
    order = [node.name for node in site.nodes]
    plain = simulate(site, order, sizes, gpt, Execution())
    overlapped = simulate(site, order, sizes, gpt, Execution(overlap="on"))
    two = simulate(site, order, sizes, gpt, Execution(overlap="on", hierarchical=True))
    assert two.step_s < overlapped.step_s < plain.step_s
    # what is waited for is the network, whichever chunk or level is under way
    for step in (plain, overlapped, two):
        assert (
            step.causes["bubble"] < 1e-3 * step.step_s
            and step.causes["reduce_across"] > 0.1 * step.step_s
        )


def test_stock_runs_all_over_ethernet():
    site, sizes, gpt = (
        two_clusters(4, 4, ethernet="500Mb/s"),
        Sizes(pipeline=2),
        model(gpu=Gpu(2e11)),
    )
    order = [node.name for node in site.nodes]
    stock = simulate(site, order, sizes, gpt, Execution(), only=stock_fabric(site))
    assert {fabric for _, fabric, _ in stock.carried} == {"ethernet"}
    assert simulate(site, order, sizes, gpt, Execution()).step_s < stock.step_s


def test_flows_are_shared_max_min_fairly():
    """Two flows out of x at 10 b/s, one of them into slow y at 2 b/s: 8 and 2."""
    transfers = {
        "xy": Transfer(1, bits=20, uses=(("x", 1), ("y", 1))),
        "xz": Transfer(1, bits=80, uses=(("x", 1), ("z", 1))),
    }
    programs = [
        [("post", "xy"), ("wait", "xy", "send", 0)],
        [("post", "xz"), ("wait", "xz", "send", 0)],
    ]
    Simulation(programs, transfers, {"x": 10.0, "y": 2.0, "z": 100.0}).run()
    assert transfers["xy"].ended == pytest.approx(10.0) and transfers["xz"].ended == pytest.approx(
        10.0
    )


def test_a_deadlock_is_told():
    with pytest.raises(HolmesError, match="actor 0 deadlocks, waiting for x"):
        Simulation([[("wait", "x", "send", 0)]], {"x": Transfer(1)}, {}).run()


@pytest.mark.parametrize(
    "change,word",
    [
        ({"overlap": "x"}, "overlap"),
        ({"zero": 4}, "zero"),
        ({"zero": 2}, "under a pipeline"),
        ({"block_s": -1.0}, "block_s"),
        ({"virtual": 5}, "are too few"),
        ({"stage_layers": (1, 2)}, "stage_layers"),
    ],
)
def test_what_does_not_fit_is_told(change, word):
    site = two_clusters()
    with pytest.raises(HolmesError, match=word):
        simulate(
            site,
            [node.name for node in site.nodes],
            Sizes(pipeline=2),
            model(),
            replace(Execution(), **change),
        )


def test_curves():
    plain = Curve(8e6, 0.001)
    assert (
        plain.seconds(1e6) == pytest.approx(1.001)
        and plain.fixed_s(1e6) == pytest.approx(0.001)
        and plain.seconds(0) == 0
    )
    curve = fit([(1000, 0.01), (100_000, 0.02), (1_000_000, 0.11), (2_000_000, 0.21)])
    assert curve.rate_bps == pytest.approx(8e7)
    assert curve.seconds(500) == 0.01 and curve.seconds(100_000) == 0.02
    assert curve.seconds(4_000_000) == pytest.approx(0.41)
    noisy = fit([(1000, 0.03), (2000, 0.02), (4000, 0.04)])
    assert noisy.points == ((1000, 0.02), (2000, 0.02), (4000, 0.04))
    twice = Link("x", curve, curve).scaled(2).send
    assert (
        twice.seconds(2_000_000) == pytest.approx(0.01 + 0.1)
        and twice.rate_bps == 2 * curve.rate_bps
    )
    for points in (((2, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0)), ((0, 1.0),), ((1, -1.0),)):
        with pytest.raises(HolmesError):
            Curve(1e6, points=points)
    with pytest.raises(HolmesError, match="two or more points"):
        fit([(1, 1.0)])


def test_measured_links_replace_nominal_ones():
    site, gpt = two_clusters(), model(gpu=Gpu(2e11))
    order = [node.name for node in site.nodes]
    slow = Curve(1e8, points=((1e3, 0.01), (1e6, 0.1)))
    nominal = simulate(site, order, Sizes(pipeline=2), gpt)
    measured = simulate(
        site, order, Sizes(pipeline=2), gpt, links=Links({"ethernet": Link("ethernet", slow, slow)})
    )
    assert measured.step_s > nominal.step_s


def test_a_ring_of_four_passes_three_quarters_of_its_bytes_twice():
    site, gpt = two_clusters(4, 4), model()
    step = simulate(site, [node.name for node in site.nodes], Sizes(pipeline=2), gpt)
    layers = gpt.costs()
    sent = {fabric: value for (_, fabric, way), value in step.carried.items() if way == "out"}
    assert sent["a"] == pytest.approx(1.5 * 4 * (layers[0].parameters + 4 * layers[1].parameters))


def test_a_flow_that_stands_for_three_takes_three_shares():
    """3 + 1 flows out of x at 8 b/s: 2 each; then 3 at 8/3."""
    transfers = {
        "three": Transfer(1, bits=20, uses=(("x", 3),)),
        "one": Transfer(1, bits=10, uses=(("x", 1), ("y", 1))),
    }
    programs = [[("post", tag), ("wait", tag, "send", 0)] for tag in transfers]
    Simulation(programs, transfers, {"x": 8.0, "y": 2.0}).run()
    assert transfers["one"].ended == pytest.approx(5.0) and transfers[
        "three"
    ].ended == pytest.approx(5.0 + 10 / (8 / 3))


def test_interleaved_warm_up_is_megatrons():
    order = passes(1, 4, 8, 2)
    assert [unit[0] for unit in order].index("B") == (4 - 1 - 1) * 2 + (2 - 1) * 4 + 1


@pytest.mark.parametrize("zero,parts", [(1, (0, 0, 1)), (2, (1, 0, 1)), (3, (1, 2, 0))])
def test_bytes_of_zero(zero, parts):
    """ZeRO's bytes by hand, for each of n = 4 ranks; 4 and 2 bytes a parameter.

    They are scattered and gathered every micro-batch, and (once) gathered after the optimizer.
    """
    site, gpt = two_clusters(2, 2), model(micro_batches=3)
    step = simulate(site, [node.name for node in site.nodes], Sizes(), gpt, Execution(zero=zero))
    total, share = sum(layer.parameters for layer in gpt.costs()), 3 / 4
    scattered, gathered, once = parts
    expected = share * total * (3 * (4 * scattered + 2 * gathered) + once * 2) + (
        share * total * 4 if zero == 1 else 0.0
    )
    sent = [value for (_, fabric, way), value in step.carried.items() if way == "out"]
    assert sent == pytest.approx([expected] * len(sent)) and sent
    assert (
        step.causes["reduce_across"] == pytest.approx(8 * expected / 1e9, rel=0.05)
        and step.causes["bubble"] < 1e-9
    )


def test_bytes_of_shards_inside_clusters():
    """The bytes of shards inside clusters by hand, for each of 2 + 2 ranks; 4 bytes a gradient, 2 a weight.

    Inside go half of both weights' gathers and of an all-reduce (gloo's reduce-scatter) twice.
    Across goes an all-reduce of two ranks of half the gradients.
    """
    site, gpt = two_clusters(2, 2), model(micro_batches=1)
    step = simulate(
        site,
        [node.name for node in site.nodes],
        Sizes(),
        gpt,
        Execution(zero=3, scatter=1.0, replicas="clusters"),
    )
    total = sum(layer.parameters for layer in gpt.costs())
    sent = {fabric: value for (_, fabric, way), value in step.carried.items() if way == "out"}
    assert sent == pytest.approx(
        {
            "ethernet": 4 * total / 2,
            "a": (2 * 2 * total + 2 * 4 * total) / 2,
            "b": (2 * 2 * total + 2 * 4 * total) / 2,
        }
    )
    with pytest.raises(HolmesError, match="replicas"):
        Execution(replicas="nodes")


def test_experts_are_reduced_only_where_they_are_held():
    """The gradients of 8 experts, 2 on each rank, are reduced by no one, all else by all 4.

    4 all-to-alls a block and micro-batch pace the step.
    """
    site, gpt = two_clusters(2, 2), model(experts=8, experts_per_token=2, micro_batches=3)
    order = [node.name for node in site.nodes]
    step = simulate(site, order, Sizes(expert=4), gpt, Execution())
    layers = gpt.costs(1, 1, 4)
    dense = sum(layer.parameters - layer.expert_parameters for layer in layers)
    assert layers[1].expert_parameters == 2 * (8 * 256 * 256 + 5 * 256)
    assert [value for (_, _, way), value in step.carried.items() if way == "out"] == pytest.approx(
        [2 * 3 / 4 * dense * 4] * 2
    )
    bytes_of_block = 4 * (
        128 * 256 * 2 * 2 * 3 / 4
    )  # 4 all-to-alls x tokens x hidden x 16 bits x 2 experts, 3 of 4 elsewhere
    assert layers[1].expert_bytes == bytes_of_block
    alone = simulate(
        site, order, Sizes(expert=4), gpt, Execution(), costs=flat_costs(1, 8, 3, 0.0, 0.0)
    )
    compute = 3 * sum(layer.forward_flops + layer.backward_flops for layer in layers) / 1e12
    in_turn = 3 * 8 * (8 * bytes_of_block / 1e9 + 3 * 3e-5)  # 3 latencies
    assert step.step_s - alone.step_s - compute == pytest.approx(in_turn, rel=1e-3)


@pytest.mark.parametrize("host_s", [0.0, 1e-12, 1e-9, 1e-6])
@pytest.mark.parametrize("cores, crowd", [(0, 1), (1, 4), (2, 2), (8, 1)])
def test_software_shares_the_cores_that_there_are(cores, crowd, host_s):
    """The software of 4 ranks, which do the same at the same time, shares the cores.

    3 micro-batches of 2 layers take 3 seconds each. The cores' seconds for a byte change nothing,
    because the network is not used.
    """
    options = Execution(block_s=0.05, step_s=0.2, parameter_s=0.0, cores=cores)
    site = one_node(4)
    links = Links({fabric.name: replace(Link.of(fabric), host_s=host_s) for fabric in site.fabrics})
    step = simulate(site, ["a0"], Sizes(), model(2, 3), options, links, costs=flat_costs(1, 2, 3))
    assert step.step_s == pytest.approx(3 * 2 * 3.0 + (3 * 2 * 0.1 + 0.2) * crowd)
    assert (
        step.causes["compute"] == pytest.approx(3 * 2 * 3.0 + 3 * 2 * 0.1 * crowd)
        and not step.carried
    )


@pytest.mark.parametrize(
    "sizes, options",
    [
        (Sizes(), Execution()),
        (Sizes(), Execution(hierarchical=True, direct=True)),
        (Sizes(pipeline=2), Execution()),
    ],
    ids=["ring", "a hierarchical all-reduce", "pipeline"],
)
def test_bytes_cost_the_seconds_of_shared_cores_that_hosts_need_for_them(sizes, options):
    """The 2 cores of a node are busy all the time, with every byte that any of the nodes sends.

    The 4 + 4 nodes compute nothing.
    """
    site, gpt = two_clusters(4, 4), model(micro_batches=3, tied=True)
    order, idle = [node.name for node in site.nodes], flat_costs(sizes.pipeline, 8, 3, 0.0, 0.0)
    slow = {
        fabric.name: replace(Link.of(replace(fabric, latency_s=0.0)), host_s=1e-6)
        for fabric in site.fabrics
    }
    options = replace(options, cores=2, parameter_s=0.0)
    step = simulate(site, order, sizes, gpt, options, Links(slow), costs=idle)
    sent = 4 * sum(value for (_, _, way), value in step.carried.items() if way == "out")
    assert step.step_s == pytest.approx(1e-6 * sent / 2, rel=1e-6) and sent > 1e7
    own = simulate(site, order, sizes, gpt, replace(options, cores=0), Links(slow), costs=idle)
    assert own.step_s < step.step_s / 100, "where nodes have cores of their own"


def on_two_cores(options, **costs):
    """Simulate a step of 4 + 4 nodes that compute nothing, with 2 cores each.

    costs: what the cores do for bytes and messages, which keeps them busy all the time.
    """
    site = two_clusters(4, 4)
    own = {
        fabric.name: replace(
            Link.of(replace(fabric, latency_s=0.0)), host_s=costs.pop(fabric.name, 1e-12)
        )
        for fabric in site.fabrics
    }
    order, options = [node.name for node in site.nodes], replace(options, cores=2)
    gpt, idle = model(activation_width=4), flat_costs(1, 8, 1, 0.0, 0.0)
    return simulate(site, order, Sizes(), gpt, options, Links(own, **costs), costs=idle)


def test_messages_of_hierarchical_take_core_time():
    """Of each chunk 4 x 3 in each cluster and 8 across, both twice."""
    options = Execution(DDP, hierarchical=True, direct=True, parameter_s=0.0)
    small, step = on_two_cores(options), on_two_cores(options, host_message_s=1.0)
    chunks = step.step_s / (2 * (4 * 3 * 2 + 8) / 2)
    assert chunks == pytest.approx(round(chunks), rel=1e-3) and chunks >= 1 > small.step_s


def test_gathered_and_scattered_bytes_have_costs_of_their_own():
    options = Execution(LOOP, zero=3, scatter=1.0, parameter_s=0.0)
    slow = dict.fromkeys(("a", "b", "ethernet"), 1e-6)
    both, gather, scatter = (
        on_two_cores(options, **slow, **more).step_s
        for more in ({}, {"host_gather": 3.0}, {"host_scatter": 3.0})
    )
    assert gather == pytest.approx(2 * both, rel=1e-3) and scatter == pytest.approx(
        2 * both, rel=1e-3
    )


@pytest.mark.parametrize("replicas, ranks", [("", 8), ("clusters", 4)])
def test_an_optimizer_steps_what_its_rank_owns(replicas, ranks):
    step = on_two_cores(Execution(LOOP, zero=3, replicas=replicas, parameter_s=1e-3))
    parameters = sum(layer.parameters for layer in model().layers_of(Sizes().complete(8)))
    assert step.causes["optimizer"] == pytest.approx(1e-3 * parameters / ranks * 8 / 2, rel=1e-3)


@pytest.mark.parametrize("sums", [0, 1, 2])
def test_what_a_script_sums_at_a_steps_end_goes_round_the_ring_twice_and_is_waited_for(sums):
    """4 nodes, 10 ms from one to the next: 6 messages."""
    site = two_clusters(2, 2)
    site = replace(site, fabrics=tuple(replace(fabric, latency_s=0.01) for fabric in site.fabrics))
    order, idle = [node.name for node in site.nodes], flat_costs(1, 8, 3)
    options = Execution(engine=LOOP, parameter_s=0.0)
    without = simulate(site, order, Sizes(), model(micro_batches=3), options, costs=idle).step_s
    step = simulate(
        site, order, Sizes(), model(micro_batches=3), replace(options, sums=sums), costs=idle
    )
    assert step.step_s == pytest.approx(without + sums * 6 * 0.01)


@pytest.mark.parametrize("interleaved, latencies", [(False, 3), (True, 7)])
def test_a_number_goes_down_gloos_ring_and_crosses_as_often_as_its_order_has_it(
    interleaved, latencies
):
    """2 + 2 nodes, 20 ms between the clusters: until the last rank has it."""
    site = site_from_spec(load_spec(f"{EXAMPLES}/../benchmarks/links_two_20ms.toml"))
    order = ["a0", "b0", "a1", "b1"] if interleaved else ["a0", "a1", "b0", "b1"]
    options, idle = Execution(engine=LOOP, parameter_s=0.0), flat_costs(1, 8, 3)
    args = site, order, Sizes(), model(micro_batches=3)
    only = stock_fabric(site)
    steps = [
        simulate(*args, replace(options, sums=sums), only=only, costs=idle).step_s
        for sums in (0, 1)
    ]
    assert steps[1] - steps[0] == pytest.approx(latencies * 0.02, rel=0.02)


@pytest.mark.parametrize("interleaved, latencies", [(False, 3), (True, 7)])
def test_the_gradient_norm_of_a_pipeline_goes_down_gloos_ring_too(interleaved, latencies):
    """Four stages on 2 + 2 nodes, 20 ms between the clusters: as a number among four data-parallel ranks."""
    site = site_from_spec(load_spec(f"{EXAMPLES}/../benchmarks/links_two_20ms.toml"))
    order = ["a0", "b0", "a1", "b1"] if interleaved else ["a0", "a1", "b0", "b1"]
    idle = flat_costs(4, 8, 3)
    steps = []
    for norm in (False, True):
        options = Execution(engine=replace(LOOP, norm=norm), parameter_s=0.0)
        step = simulate(
            site,
            order,
            Sizes(4),
            model(micro_batches=3),
            options,
            only=stock_fabric(site),
            costs=idle,
        )
        steps.append(step.step_s)
    assert steps[1] - steps[0] == pytest.approx(latencies * 0.02, rel=0.02)
