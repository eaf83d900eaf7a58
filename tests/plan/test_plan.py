"""plan.json: round trips, every kind of bad file, and a few hundred mutated ones."""

import json
import random
from dataclasses import replace

import clusters
import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.plan.decide import derive_traffic
from holmes_ext.plan.plan import Plan, SpanningGroups, check_plan, load_plan, parse_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import CrossClusterAlgorithm, ReductionSpec

SITE = clusters.site(processes=2)


def plan(**changes):
    values = dict(
        site_digest=SITE.digest,
        nodes=("a0", "a1", "b0", "b1"),
        processes=2,
        sizes=Sizes(2, 2).complete(8),
        spanning=(SpanningGroups("data", 1, ("a0", "b0"), "ethernet", 0.5),),
        stage_layers=(3, 5),
        predicted={"step_seconds": 1.5},
    )
    values |= changes
    return replace(derive_traffic(Plan(**values), SITE), spanning=values["spanning"])


def edited(**changes):
    """plan.json with changed keys and the old digest, which is checked last."""
    return json.dumps({**json.loads(plan().to_json()), **changes})


def test_round_trip(tmp_path):
    path = tmp_path / "plan.json"
    for original in (plan(), plan(sizes=None, stage_layers=(), spanning=(), predicted={})):
        original.save(path)
        assert replace(load_plan(path), source=original.source) == replace(original, traffic=())
        path.write_text(original.to_json())  # what `holmes plan --json` prints
        assert derive_traffic(load_plan(path), SITE).traffic == original.traffic
        original.save(path)
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_older_file_is_refused_with_the_way_out(version):
    way_out = "this holmes_ext reads version 4; make the plan again with `holmes plan`"
    with pytest.raises(HolmesError, match=f"^p.json: key 'version' is {version}; {way_out}$"):
        parse_plan(edited(version=version), "p.json")


def test_an_algorithm_across_clusters_is_told_to_other_ranks():
    tree = CrossClusterAlgorithm("tree", ("b", "a"), ("", "b"))
    planned = ReductionSpec(True, 2**20, ("a", "b"), across=tree)
    made = replace(
        plan(), traffic=tuple(replace(one, reductions=(planned,)) for one in plan().traffic)
    )
    assert parse_plan(made.to_json(), made.source) == made


#: Two nodes of 2 processes and one of 4.
UNEQUAL = clusters.site("a ib 2Gb/s a[0-1] processes=2", "b roce 1.6Gb/s b0 processes=4")


def unequal_plan(nodes=("a0", "b0", "a1")):
    made = Plan(UNEQUAL.digest, nodes, 2, processes_of=UNEQUAL.processes_of)
    return derive_traffic(made, UNEQUAL)


def test_ranks_of_unequal_nodes(tmp_path):
    made = unequal_plan()
    assert made.world_size == 8
    assert made.first_ranks == {"a0": 0, "b0": 2, "a1": 6}
    assert [made.first_rank(node) for node in made.nodes] == [0, 2, 6]
    assert [made.node_of(rank) for rank in range(8)] == ["a0"] * 2 + ["b0"] * 4 + ["a1"] * 2
    assert [made.processes_on(node) for node in made.nodes] == [2, 4, 2]
    assert made.by_cluster(range(8)) == {"a": [0, 1, 6, 7], "b": [2, 3, 4, 5]}
    made.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert check_plan(loaded, UNEQUAL).first_ranks == made.first_ranks
    assert made.widths_text() == "2 on a0, 4 on b0"


def test_a_node_that_begins_at_no_multiple_of_its_processes():
    assert unequal_plan(("a0", "b0", "a1")).misaligned_node() == "b0"
    assert unequal_plan(("a0", "a1", "b0")).misaligned_node() == ""
    assert unequal_plan(("b0", "a0", "a1")).misaligned_node() == ""


@pytest.mark.parametrize(
    "processes_of, message",
    [
        ({"a0": 2}, "key 'processes_of' must have every node of key 'nodes', and no other"),
        ({"a0": 2, "a1": 2, "b0": 4, "x": 4}, "key 'processes_of' must have every node"),
        ({"a0": 2, "a1": 0, "b0": 4}, "key 'processes_of': a node has fewer than 1 process"),
    ],
)
def test_wrong_numbers_of_processes(processes_of, message):
    with pytest.raises(HolmesError, match=message):
        Plan(UNEQUAL.digest, ("a0", "a1", "b0"), 2, processes_of=processes_of)


def test_a_plan_for_other_processes_of_a_node():
    wider = clusters.site("a ib 2Gb/s a[0-1] processes=2", "b roce 1.6Gb/s b0 processes=8")
    with pytest.raises(
        HolmesError,
        match="node 'b0' has 4 processes in the plan, but 8 were started on it .world size 8 in the "
        "plan, 12 here",
    ):
        check_plan(unequal_plan(), wider)
    equal = clusters.site("a ib 2Gb/s a[0-1]", "b roce 1.6Gb/s b0", processes=2)
    with pytest.raises(HolmesError, match="node 'b0' has 4 processes in the plan, but 2 were"):
        check_plan(unequal_plan(), equal)


def test_where_ranks_are():
    assert [plan().node_of(rank) for rank in range(8)] == [
        "a0",
        "a0",
        "a1",
        "a1",
        "b0",
        "b0",
        "b1",
        "b1",
    ]
    assert plan().fabric_of((0, 2)).name == "a"
    assert plan().fabric_of((0, 4)).name == "ethernet"
    assert plan().fabric_of((0, 1)) is None
    assert plan().by_cluster((1, 4, 2)) == {"a": [1, 2], "b": [4]}


def test_digest():
    assert plan().digest == plan(source="elsewhere").digest
    assert plan().digest != plan(nodes=("b0", "a1", "a0", "b1")).digest


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"nodes": ["a0", "a0", "b0", "b1"]}, "'nodes': node 'a0' is listed twice"),
        ({"nodes": ["a0", 3]}, "'nodes'"),
        ({"nodes": []}, "'sizes'|at least one rank"),
        ({"nodes": [], "sizes": None, "stage_layers": []}, "at least one rank"),
        ({"nodes": ["a1", "a0", "b0", "b1"]}, "'digest' does not match: the file was edited"),
        ({"predicted": {"step_seconds": 9.0}}, "'digest' does not match"),
        ({"predicted": {"step_seconds": "fast"}}, "'predicted.step_seconds'"),
        ({"version": 5}, "'version' is 5; this holmes_ext reads version 4$"),
        ({"processes": 0}, "at least one rank"),
        ({"processes": "2"}, "'processes'"),
        (
            {
                "sizes": {
                    "pipeline": 3,
                    "tensor": 1,
                    "context": 1,
                    "expert": 1,
                    "data": 2,
                    "order": "tp-cp-ep-dp-pp",
                }
            },
            "'sizes': pipeline 3",
        ),
        (
            {
                "sizes": {
                    "pipeline": 0,
                    "tensor": 1,
                    "context": 1,
                    "expert": 1,
                    "data": 2,
                    "order": "tp-cp-ep-dp-pp",
                }
            },
            "'sizes': parallel size pipeline",
        ),
        (
            {
                "sizes": {
                    "pipeline": 2,
                    "tensor": 2,
                    "context": 1,
                    "expert": 1,
                    "data": 0,
                    "order": "tp-cp-ep-dp-pp",
                }
            },
            "lacks the data size",
        ),
        ({"sizes": {"pipeline": 2}}, "'sizes' lacks the data size"),
        ({"sizes": [2]}, "'sizes' is not a table"),
        ({"stage_layers": [1, 2, 3]}, "'stage_layers' has 3 entries for 2 stages"),
        ({"transports": {"data": ["a"]}}, "'transports' is not known"),
        (
            {"traffic": [{"network_apis": ["verbs"], "transports": {"data": "a"}}]},
            r"'traffic\[0\].transports.data'",
        ),
        ({"fabrics": [{"name": "a"}]}, r"'fabrics\[0\].kind' is missing"),
        ({"workload": {"micro_batches": 0}}, "'workload.micro_batches' must be 1 or more, not 0"),
        ({"spanning": [{"kind": "data"}]}, r"'spanning\[0\].groups' is missing"),
        ({"colour": "red"}, "'colour' is not known"),
    ],
)
def test_bad_plan(changes, message):
    with pytest.raises(HolmesError, match=message) as error:
        parse_plan(edited(**changes), "p.json")
    assert str(error.value).startswith("p.json: ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"version": 1}',
        '{"version": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ],
)
def test_not_a_plan(text):
    with pytest.raises(HolmesError, match="^p.json: "):
        parse_plan(text, "p.json")


def test_files(tmp_path):
    with pytest.raises(HolmesError, match="missing.json: cannot be read"):
        load_plan(tmp_path / "missing.json")
    with pytest.raises(HolmesError, match="cannot be written"):
        plan().save(tmp_path / "none" / "plan.json")


def test_plan_for_another_site():
    assert check_plan(plan(), SITE) == plan()
    fewer = replace(SITE, nodes=SITE.nodes[:3])
    with pytest.raises(HolmesError, match="the plan has node 'b1', which did not report"):
        check_plan(plan(), fewer)
    with pytest.raises(HolmesError, match="node 'b1' reported but is not in the plan"):
        check_plan(plan(nodes=("a0", "a1", "b0"), sizes=None, stage_layers=()), SITE)
    one = clusters.site()
    with pytest.raises(
        HolmesError,
        match="'processes' is 2, but 1 were started on each node .world size 8 in the plan, 4 here",
    ):
        check_plan(plan(), one)
    slower = clusters.site(*clusters.TWO[:1], "b roce 1Gb/s b[0-1]", processes=2)
    with pytest.raises(HolmesError, match="'site_digest'"):
        check_plan(plan(), slower)


def test_mutated_files_give_a_plan_or_one_clear_line():
    rng, text = random.Random(3), plan().to_json()
    junk = [
        '"',
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        "null",
        "true",
        "-1",
        "1e999",
        "NaN",
        "9" * 500,
        '"x"',
        "[]",
        "{}",
        "\\ud800",
        "\x00",
    ]
    refused = 0
    for _ in range(600):
        start = rng.randrange(len(text))
        stop = start + rng.choice((0, 1, 4, 30))
        changed = rng.choice(
            (
                text[:start],
                text[:start] + rng.choice(junk) + text[stop:],
                text[:start] + text[stop:],
            )
        )
        try:
            assert parse_plan(changed, "p.json").digest == plan().digest
        except HolmesError as error:
            refused += 1
            assert str(error).startswith("p.json: ")
    assert refused > 500


@pytest.mark.full(share=4)
def test_values_of_every_type_in_every_place_never_crash():
    values = [None, True, -1, 0, 10**30, 1.5, "x", "", [], ["x"], [1], {}, {"x": 1}, [[]], [{}]]
    document = json.loads(plan().to_json())
    places = [(key,) for key in document] + [("sizes", key) for key in document["sizes"]]
    places += [("spanning", 0, key) for key in document["spanning"][0]] + [
        ("fabrics", 0, key) for key in document["fabrics"][0]
    ]
    places += [
        ("traffic", 0, "reductions", 0, key) for key in document["traffic"][0]["reductions"][0]
    ] + [("traffic", 0, "stage_links", 0, "stages")]
    for place in places:
        for value in values:
            changed = json.loads(plan().to_json())
            target = changed
            for key in place[:-1]:
                target = target[key]
            target[place[-1]] = value
            try:
                parse_plan(json.dumps(changed), "p.json")
            except HolmesError as error:
                assert str(error).startswith("p.json: "), (place, value)
