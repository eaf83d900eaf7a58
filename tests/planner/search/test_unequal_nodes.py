"""Plans for clusters whose nodes have different numbers of GPUs: search, command line and bad input."""

import json

import clusters
import pytest
from test_docs import ROOT

from holmes_ext.cli.main import main
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec, parse_spec
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import Rules
from holmes_ext.plan.partition import uniform
from holmes_ext.plan.plan import check_plan, load_plan
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.search import changed, spreading
from holmes_ext.planner.search import search as searching
from holmes_ext.planner.search.evaluate import Evaluator
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.simulated import job_of
from holmes_ext.planner.search.space import Limits, equal_clusters, shapes
from holmes_ext.planner.simulate.repeat import folded_s

#: Four nodes of 4 GPUs and two nodes of 8: 16 GPUs in each cluster.
LINES = ("a roce 100Gb/s a[0-3] processes=4", "b ib 400Gb/s b[0-1] processes=8")
MODEL_FILE = str(ROOT / "examples" / "models" / "gpt_7.5b.toml")
MODEL = Model(
    layers=8, hidden=512, heads=8, sequence=256, vocabulary=4000, micro_batches=1, gpu=Gpu(20e12)
)
LIMITS = Limits({"recompute": ("none",), "micro_batch": (1,), "context": (1,), "zero": (0,)})


def result_on(*lines, limits=LIMITS, overlap=False, ethernet="5Gb/s"):
    site = clusters.site(*lines, ethernet=ethernet)
    return SearchResult(Network(site), MODEL, 64, limits, Rules(overlap=overlap))


def steps_of_all_plans(result):
    """Return the simulated step of each shape and order of the clusters.

    Layers are divided as evenly as possible.
    """
    evaluator = Evaluator(result)
    for shape in shapes(result.network, MODEL, result.global_batch, result.limits):
        split = uniform(MODEL.layers, shape.pipeline)
        for placement in evaluator.placements(shape)[0]:
            yield folded_s(job_of(result, result.candidate(shape, placement, split)))


@pytest.mark.parametrize(
    "lines",
    [
        LINES,
        ("a ib 100Gb/s a[0-1] processes=2", "b roce 50Gb/s b0 processes=4"),
        ("a ib 50Gb/s a[0-2] processes=2", "b roce 50Gb/s b0 processes=4"),  # 6 and 4 GPUs
        ("a ib 50Gb/s a0 processes=2", "b ib 50Gb/s b0 processes=4", "c ethernet - c0 processes=2"),
    ],
)
def test_the_best_plan_is_as_good_as_every_other(lines):
    result = result_on(*lines)
    best = searching.search(result, rows=1)
    least_s = min(steps_of_all_plans(result))
    assert best.best.step_s <= least_s * 1.01
    assert best.optimality_gap.bound_s <= least_s * (1 + 1e-9)


def test_nodes_are_spread_over_stages_in_blocks():
    """Over slow links between clusters, the two narrow nodes of a block stay together."""
    between = "".join(
        f'[[between]]\nclusters = ["{one}", "{other}"]\nrate = "{rate}Mb/s"\n'
        for one, other, rate in (("a", "b", 100), ("b", "c", 900), ("a", "c", 90))
    )
    text = clusters.toml(
        "a ib 50Gb/s a[0-3] processes=2",
        "b ib 50Gb/s b[0-1] processes=4",
        "c ib 50Gb/s c[0-1] processes=4",
        ethernet="5Gb/s",
    )
    site = site_from_spec(parse_spec(text + between))
    limits = Limits({**LIMITS.allowed, "pipeline": (3,), "tensor": (1,), "virtual": (1,)})
    result = SearchResult(Network(site), MODEL, 64, limits, Rules())
    shape = next(iter(shapes(result.network, MODEL, 64, limits)))
    mixed = result.network.placement(
        ["a0", "a1", "b0", "a2", "a3", "c0", "b1", "c1"], shape.sizes().complete(24)
    )
    variant = spreading._spread_nodes(result, result.candidate(shape, mixed, (3, 3, 2)))
    assert variant is not None
    assert sorted(variant.placement.parts) == [((0, 4),), ((1, 2),), ((2, 2),)]
    assert variant.placement.widths == (2, 4, 4)
    assert folded_s(job_of(result, variant)) < folded_s(
        job_of(result, result.candidate(shape, mixed, (3, 3, 2)))
    )


def test_nodes_are_moved_only_between_clusters_of_one_width():
    """What `--explain` tries: a node of 8 GPUs cannot join a cluster of nodes with 4."""
    result = result_on(*LINES, "c ib 100Gb/s c[0-1] processes=4")
    moves = [description for description, _ in changed._moved_nodes(result)]
    assert moves == ["one node moved from a to c", "one node moved from c to a"]


def test_groups_of_a_shape_fill_the_nodes_of_both_widths():
    result = result_on("a ib 50Gb/s a[0-3] processes=2", "b ib 50Gb/s b[0-1] processes=4")
    tensors = set()
    for shape in shapes(result.network, MODEL, result.global_batch, Limits()):
        stage_ranks = 16 // shape.pipeline
        for ranks in (shape.tensor, stage_ranks):
            assert all(width % ranks == 0 or ranks % width == 0 for width in (2, 4)), shape
        tensors.add(shape.tensor)
    assert tensors == {1, 2}, "a wider group would span nodes in one cluster only"


def test_a_message_takes_at_least_as_long_as_on_the_narrowest_node():
    """The lower bound on a stage link counts the ranks of the node that sends the fewest messages."""
    result = result_on("a ib 50Gb/s a[0-3] processes=2", "b ib 50Gb/s b[0-1] processes=4")
    limits = Limits({**LIMITS.allowed, "pipeline": (2,), "tensor": (1,), "virtual": (1,)})
    (shape,) = shapes(result.network, MODEL, result.global_batch, limits)
    prices = result.prices(shape)
    bits = 8 * 2 * prices.job.block.activation_bytes
    bound = ShapeBound(result.network, prices, shape)
    assert bound.stage_link_s(latency=False) == pytest.approx(bits / 50e9)


def test_clusters_of_equally_many_gpus_are_equal():
    """A replica of the model in each cluster needs equally many GPUs, on however many nodes."""
    assert equal_clusters(result_on(*LINES).network) == 2
    fewer = result_on("a roce 100Gb/s a[0-1] processes=4", "b ib 400Gb/s b[0-1] processes=8")
    assert equal_clusters(fewer.network) == 1


def test_more_gpus_on_one_nic_are_not_faster():
    """Eight GPUs of a node share its NIC; as two nodes of four they have two."""
    shared = result_on("a ib 10Gb/s a[0-3] processes=4", "b ib 10Gb/s b[0-1] processes=8")
    apart = result_on("a ib 10Gb/s a[0-3] processes=4", "b ib 10Gb/s b[0-3] processes=4")
    limits = {"tensor": (1,), "pipeline": (2,), **LIMITS.allowed}
    for ours, others in ((shared, apart),):
        times = [
            min(
                steps_of_all_plans(
                    SearchResult(each.network, MODEL, 64, Limits(limits), each.rules)
                )
            )
            for each in (ours, others)
        ]
        assert times[0] > times[1]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "unequal.toml"
    path.write_text(clusters.toml(*LINES, ethernet="25Gb/s"))
    return path


def test_command_line(file, tmp_path, capsys):
    """The plan that is written can be loaded by a job on these nodes."""
    plan_file = tmp_path / "plan.json"
    command = ["plan", "--cluster", str(file), "--model", MODEL_FILE, "--global-batch", "64"]
    assert main([*command, "--sizes", "pipeline=2,tensor=4", "--output", str(plan_file)]) == 0
    output = capsys.readouterr().out
    assert "32 ranks on 6 nodes: pipeline 2 x tensor 4 x data 4" in output
    assert "32 GPUs, 2 clusters" in output
    assert "no data-, tensor-, context- or expert-parallel group leaves its fabric" in output
    plan = check_plan(load_plan(plan_file), site_from_spec(load_spec(file)))
    assert plan.world_size == 32
    assert plan.processes_of == {**dict.fromkeys(("a0", "a1", "a2", "a3"), 4), "b0": 8, "b1": 8}
    assert main([*command, "--sizes", "pipeline=2,tensor=4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["processes_of"] == plan.processes_of
    assert document["sizes"]["data"] == 4


def test_bad_sizes_are_refused_without_a_number_of_nodes(file, capsys):
    """Nodes have different numbers of GPUs, so the way out is given in processes."""
    assert main(["plan", "--cluster", str(file), "--sizes", "pipeline=3"]) == 2
    assert "or 30 or 33 processes for pipeline 3" in capsys.readouterr().err


def test_a_choice_of_nodes_is_refused(file, capsys):
    """Sets of equally many nodes have different numbers of GPUs."""
    command = ["plan", "--nodes", "4", "--from-cluster", str(file), "--model", MODEL_FILE]
    assert main([*command, "--global-batch", "64"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "have 4 or 8 processes" in line and "--nodelist LIST instead of --nodes" in line
