"""What joined jobs over the links of a cluster.toml would take (join/estimate.py), by hand."""

import json
from itertools import combinations

import clusters
import pytest
from clusters import toml

from holmes_ext.cli.main import main
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.join import estimate as joined
from holmes_ext.join.settings import OuterSettings, parse_outer
from holmes_ext.join.show_plan import JoinedForecast
from holmes_ext.join.simulated_rounds import JoinedJob, simulate_round

BETWEEN = '[[between]]\nclusters = ["{}", "{}"]\nrate = "1Gb/s"\nlatency = "50ms"\n'


def text_of(*last_nodes, between="", a=""):
    """cluster.toml; a: keys of the first cluster."""
    clusters = [f"{name} ib 100Gb/s {name}[0-{last}]" for name, last in zip("abcd", last_nodes)]
    return toml(clusters[0] + a, *clusters[1:], ethernet="10Gb/s", processes=2) + between


def site(*last_nodes, flat=False):
    pairs = [] if flat else combinations("abcd"[: len(last_nodes)], 2)
    text = text_of(*last_nodes, between="".join(BETWEEN.format(*pair) for pair in pairs))
    return site_from_spec(parse_spec(text, "c.toml"))


def test_seconds_of_a_round():
    two, bits = site(0, 0), 16 * 5e8 / 4  # bf16, four fragments
    assert joined.round_seconds(two, 5e8, 4) == pytest.approx(bits / 1e9 + 3 * 2 * 0.05)
    assert joined.round_seconds(two, 5e8, 4, "off") == pytest.approx(2 * bits / 1e9 + 0.3)
    # a link for each pair
    assert joined.round_seconds(site(0, 0, 0), 5e8, 4) == pytest.approx(bits / 1e9 + 0.3)
    # a's one NIC
    assert joined.round_seconds(site(0, 1, flat=True), 5e8, 4) == pytest.approx(
        bits / 10e9, rel=1e-3
    )


@pytest.mark.parametrize(
    "clusters, parameters, delay",
    [
        ((0, 0), 5e8, 3),
        ((0, 0, 0), 5e8, 30),
        ((3, 3), 5e8, 3),
        ((0, 0), 0.0, 2),
        ((1, 1, 1), 5e8, 0),
    ],
)
def test_the_simulation_is_the_closed_form_where_nothing_is_shared(clusters, parameters, delay):
    """Jobs of one size, a link for each pair, steps that send nothing."""
    where = site(*clusters)
    runners = [JoinedJob(name, 8, 1.0 + 0.3 * (name == "b")) for name in where.clusters]
    found = simulate_round(where, runners, 16 * parameters / 4, 4, delay)
    alone_s = joined.round_seconds(where, parameters, 4)
    assert found.round_s == pytest.approx(alone_s) and found.longer_s == pytest.approx(0, abs=1e-9)
    assert found.waited_s == pytest.approx(max(0, alone_s - delay * 1.3), abs=1e-9)


def test_jobs_share_uplinks_and_links_are_not_equal():
    """a's uplink carries 2 of the 3 streams that leave: those to b and c; c's link to b is slow by itself."""
    links = [
        BETWEEN.format(*pair).replace("1Gb/s", rate)
        for pair, rate in ((("a", "b"), "10Gb/s"), (("a", "c"), "10Gb/s"), (("b", "c"), "0.1Gb/s"))
    ]
    found = [
        simulate_round(
            site_from_spec(
                parse_spec(text_of(0, 0, 0, between="".join(some), a=" uplink=1Gb/s"), "c.toml")
            ),
            [JoinedJob(name, 8, 1.0) for name in "abc"],
            1e9,
            2,
            1,
        ).round_s
        for some in (links, links[:2] + [links[0].replace('"a", "b"', '"b", "c"')])
    ]
    assert found[0] == pytest.approx(10 + 0.3)  # a tenth of a Gb/s
    assert found[1] == pytest.approx(2 + 0.3)  # the uplink: twice 10^9 bits


def test_steps_that_use_ethernet_and_a_round_are_in_each_others_way():
    """A NIC of 10 Gb/s, a link as wide: half of it each while both send; the step takes longer by what the
    round takes away, and the round by what the step does. Other steps are as they were."""
    between = BETWEEN.format("a", "b").replace("1Gb/s", "10Gb/s").replace("50ms", "1us")
    text = text_of(0, 0, between=between)
    wide = site_from_spec(parse_spec(text, "c.toml"))
    one, two = (
        simulate_round(wide, [JoinedJob(name, 8, 1.0, ethernet_s) for name in "ab"], 20e9, 3, 8)
        for ethernet_s in (0.0, 0.5)
    )
    assert (one.round_s, one.longer_s) == (pytest.approx(2, rel=1e-4), 0)
    assert two.waited_s == 0
    assert two.round_s == pytest.approx(3, rel=0.05)  # 1 of 3 alone, 2 shared: 2 s of bits
    assert two.longer_s == pytest.approx(1, rel=0.05)  # half of what was shared
    narrow = [
        simulate_round(site(0, 0), [JoinedJob(name, 8, 1.0, share) for name in "ab"], 2e9, 3, 5)
        for share in (0, 0.5)
    ]
    assert narrow[1].round_s == pytest.approx(
        narrow[0].round_s
    )  # a tenth of the NIC: the link decides
    assert 0 < narrow[1].longer_s < 0.1 * narrow[0].round_s


@pytest.mark.parametrize("step_s", [0.02, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("ethernet", [0.0, 0.6])
def test_what_is_said_to_be_hidden_is_and_can_be_asked_for(step_s, ethernet):
    """5 * 10^8 parameters over 1 Gb/s: 8 s of bits."""
    jobs = [JoinedJob("a", 8, step_s / 2), JoinedJob("b", 8, step_s, ethernet * step_s)]
    rounds = joined.RoundForecasts(site(0, 0), 5e8, jobs)
    default, *hidden = joined.settings(rounds)
    given = OuterSettings()
    assert (default.every, default.fragments, default.delay) == (
        given.every,
        given.fragments,
        given.delay,
    )
    assert default.samples_per_s == pytest.approx(
        16 / (step_s + default.exposed_s + default.slower_s)
    )
    assert len(hidden) == (2 if step_s > 0.06 else 1), (
        "with 5 steps of delay the trips alone must fit"
    )
    for one in hidden:
        assert not one.exposed_s and one.samples_per_s == pytest.approx(
            16 / (step_s + one.slower_s)
        )
        assert (one.slower_s > 0) == bool(ethernet) and one.slower_s < 0.11 * step_s
        assert parse_outer(str(one)).period == one.delay + 1
        assert one.round_s <= one.delay * (step_s + one.slower_s * (one.delay + 1)) * (1 + 1e-9)
    least = hidden[0]
    assert least.delay == 1 or rounds.forecast(least.every - 4, 4, least.delay - 1).exposed_s, (
        "with less delay it is exposed"
    )
    if not ethernet:
        assert default.exposed_s == pytest.approx(max(0, default.round_s - 5 * step_s) / 8)


def test_what_comes_of_each_every():
    jobs = [JoinedJob(name, 8, 1.0, 0.2) for name in "ab"]
    rounds = joined.RoundForecasts(site(0, 0), 5e8, jobs)
    lines = joined.over_every(rounds)
    known = joined.settings(rounds)
    assert len(lines) == 3 and {one for line in lines.values() for one in line} >= set(known)
    for line in lines.values():
        assert [one.every for one in line] == sorted({one.every for one in line})
        assert all(parse_outer(str(one)) for one in line)
    late = next(iter(lines.values()))
    rates = [one.samples_per_s for one in late]
    assert rates == sorted(rates) and late[0].exposed_s and not late[-1].exposed_s


def test_samples_go_by_ranks_in_whole_micro_batches():
    assert joined.shares(site(0, 2), 64, 2) == {"a": 16, "b": 48}
    assert joined.shares(site(0, 2), 2, 2) == {"a": 2, "b": 2}
    wide = clusters.site("a ib 100Gb/s a0 processes=2", "b ib 100Gb/s b0 processes=6")
    assert joined.shares(wide, 64, 2) == {"a": 16, "b": 48}, "by ranks, not by nodes"
    assert {node.cluster for node in joined.site_of_cluster(site(0, 2), "b").nodes} == {"b"}


MODEL = """version = 1
name = "small"
layers = 4
hidden = 64
heads = 4
vocabulary = 512
sequence = 32
[training]
micro_batch = 2
global_batch = 32
[gpu]
flops = 1e12
memory_bytes = 1e9
"""


def test_holmes_plan_joined(tmp_path, capsys):
    (tmp_path / "model.toml").write_text(MODEL)
    page, found = tmp_path / "plan.html", []
    more = ["--json", "--html", str(page), "--pictures", str(tmp_path / "pictures")]
    for name, last, options in (("two", (1, 1), more), ("one", (1,), [])):
        between = BETWEEN.format("a", "b") if len(last) > 1 else ""
        (tmp_path / f"{name}.toml").write_text(text_of(*last, between=between))
        arguments = [
            "plan",
            "--cluster",
            str(tmp_path / f"{name}.toml"),
            "--model",
            str(tmp_path / "model.toml"),
        ]
        found.append(
            (main([*arguments, "--joined", "--seconds", "2", *options]), *capsys.readouterr())
        )
    assert found[1][0] == 2 and "--joined needs two clusters or more; it has 1" in found[1][2]
    assert found[0][0] == 0
    told = json.loads(found[0][1])["joined"]
    assert [job["cluster"] for job in told["jobs"]] == ["a", "b"] and told["settings"][0][
        "every"
    ] == 32
    choices = told["choices"]
    assert [one["name"].split()[0] for one in choices] == ["one", "one", "joined"]
    assert choices[-1]["flags"] == "--holmes --holmes-join a@HOST:29600"
    assert choices[-1]["tokens_per_second"] == told["settings"][0]["tokens_per_second"], (
        "of the default"
    )
    assert (tmp_path / "pictures" / "joined.png").stat().st_size > 10_000
    text = page.read_text()
    assert (
        "Joined jobs in its place" in text and "one job that crosses, the best plan</text>" in text
    )
    assert "nothing is exposed from every=" in text
    assert all(f"every={one['every']},fragments" in text for one in told["settings"])


def beside_of(jobs, crossing):
    where = site(*[0] * jobs)
    rounds = joined.RoundForecasts(
        where, 1e6, [JoinedJob(name, 10, 1.0) for name in where.clusters]
    )
    return JoinedForecast(rounds, 100, crossing)


def test_the_last_line_is_the_one_to_copy(capsys):
    beside_of(2, 1.0).show()
    assert capsys.readouterr().out.splitlines()[-1].strip() == "--holmes --holmes-join a@HOST:29600"
    beside_of(2, 1e9).show()
    assert capsys.readouterr().out.splitlines()[-1].strip() == "--holmes --holmes-cluster FILE"


def test_a_row_stands_only_where_the_loss_is_known():
    assert [len(beside_of(jobs, 1.0).choices()) for jobs in (2, 3, 4)] == [3, 2, 3]
