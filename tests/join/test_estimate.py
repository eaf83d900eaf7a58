"""What joined jobs over the links of a cluster.toml would take (join/estimate.py), by hand."""

import html
import json
from dataclasses import replace
from itertools import combinations

import clusters
import pytest
from clusters import toml

from holmes_ext.cli.main import main
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.join import estimate as joined
from holmes_ext.join import priced_jobs
from holmes_ext.join.priced_jobs import price_jobs
from holmes_ext.join.settings import OuterSettings, parse_outer
from holmes_ext.join.show_plan import NOT_MEASURED, JoinedForecast, beside
from holmes_ext.join.simulated_rounds import JoinedJob, simulate_round
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.planner.search import sketch
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import first_look

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
    """Job a's uplink carries 2 of the 3 streams that leave (to b and c); c's link to b is slow by itself."""
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
    """A step and a round that use the same NIC share its rate.

    The NIC has 10 Gb/s, and the link is as wide: each gets half of it while both send. The step
    takes longer by what the round takes away, and the round by what the step does. Other steps are
    as they were.
    """
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
            (main([*arguments, "--joined", "--seconds", "1", *options]), *capsys.readouterr())
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
    text = page.read_text().replace("<wbr>", "")
    assert "Joined jobs in its place" in text
    assert "one job across</text>" in text, "the bar of the best plan of one job"
    assert "nothing is exposed from every=" in text
    assert all(f"every={one['every']},fragments" in text for one in told["settings"])


def beside_of(jobs, crossing):
    where = site(*[0] * jobs)
    rounds = joined.RoundForecasts(
        where, 1e6, [JoinedJob(name, 10, 1.0) for name in where.clusters]
    )
    return JoinedForecast(rounds, 100, crossing)


def test_the_choice_comes_first_with_the_line_to_copy(capsys):
    for crossing, flags in ((1.0, "--holmes-join a@HOST:29600"), (1e9, "--holmes-cluster FILE")):
        beside_of(2, crossing).show()
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        (advice,) = (number for number, line in enumerate(lines) if "recommended: " in line)
        assert lines[advice + 1] == f"--holmes {flags}"
        assert lines[1].startswith("choice")
        details = [number for number, line in enumerate(lines) if line.startswith("--holmes-outer")]
        assert min(number for number in details if "round, s" in lines[number]) > advice


@pytest.mark.parametrize("jobs, crossing", [(2, 1.0), (2, 1e9), (3, 1.0), (3, 1e9), (4, 1.0)])
def test_the_page_has_the_verdict_of_the_terminal(jobs, crossing, capsys):
    forecast = beside_of(jobs, crossing)
    forecast.show()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "recommended: " in line]
    verdict = forecast.verdict()
    assert line.startswith(f"{verdict}; ")
    assert ("was not measured" in verdict) == (jobs == 3)
    page = html.unescape("\n".join(forecast.page_parts()))
    assert f"<p>{line}</p>" in page
    titles = {axis.get_title("left").replace("\n", " ") for axis in forecast.figure().axes}
    assert titles == {verdict}


def test_a_row_stands_only_where_the_loss_is_known():
    assert [len(beside_of(jobs, 1.0).choices()) for jobs in (2, 3, 4)] == [3, 2, 3]


def test_nothing_is_recommended_from_an_unfinished_search(capsys, monkeypatch):
    """The searches are named, their rows are marked, and no flags are printed."""
    monkeypatch.setenv("COLUMNS", "200")  # no name in the table is wrapped
    whole = beside_of(2, 1.0)
    cut = JoinedForecast(whole.rounds, 100, 1.0, unfinished=("b",), is_spanning_job_unfinished=True)
    cut.show()
    text = capsys.readouterr().out
    assert "no recommendation" in text and "give more --seconds" in text
    assert "one job on b alone, one job across" in text
    assert text.count("(search unfinished)") == 3
    assert "--holmes-join" not in text and "recommended: " not in text
    assert cut.document()["unfinished"] == ["one job on b alone", "one job across"]
    assert whole.document()["unfinished"] == []


SMALL = Model(4, 64, 4, 32, 512, global_batch=32, gpu=Gpu(1e12, 1e9))


def request(*last_nodes, flops=()):
    """Return a search request for a small model on clusters a, b, ...

    Args:
        last_nodes: Number of the last node of each cluster.
        flops: FLOP/s of a GPU of each cluster; 1e12 without any.
    """
    gpus = {name: Gpu(rate, 1e9) for name, rate in zip("abcd", flops)}
    model = replace(SMALL, gpus=gpus)
    return SearchResult(Network(site(*last_nodes)), model, model.global_batch)


def test_equal_clusters_are_searched_once(monkeypatch):
    searched = []

    def counted(problem, seconds):
        searched.append(problem.network.site.clusters)
        return first_look(problem, seconds)

    monkeypatch.setattr(priced_jobs, "first_look", counted)
    batches = dict.fromkeys("abcd", 8)
    priced = price_jobs(request(1, 1, 1, 1), batches, seconds=10.0)
    assert searched == [("a",)]
    assert [job.cluster for job in priced.jobs] == list("abcd")
    assert len({(job.step_s, job.ethernet_s) for job in priced.jobs}) == 1
    # b has other GPUs, c another number of nodes, d another batch
    searched.clear()
    price_jobs(request(1, 1, 3, 1, flops=(1e12, 2e12, 1e12, 1e12)), batches | {"d": 16}, 10.0)
    assert searched == [("a",), ("b",), ("c",), ("d",)]


def test_little_time_gives_the_same_step_or_is_reported(monkeypatch):
    batches = {"a": 16, "b": 16}
    whole = price_jobs(request(1, 1), batches, seconds=1e9)
    assert not whole.unfinished
    monkeypatch.setattr(priced_jobs, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(sketch, "FLOOR_S", 1e9)
    assert price_jobs(request(1, 1), batches, seconds=0.0).jobs == whole.jobs
    monkeypatch.setattr(sketch, "MIN_RANKED", 1)
    assert price_jobs(request(1, 1), batches, seconds=0.0).unfinished == ["a", "b"]


def test_a_model_with_a_number_of_micro_batches_can_be_joined():
    """Megatron's command lines give micro-batches; each job has its share of the batch instead."""
    asked = request(1, 1)
    model = replace(asked.model, global_batch=0, micro_batches=8)
    priced = price_jobs(replace(asked, model=model), {"a": 16, "b": 16}, seconds=10.0)
    assert priced.jobs == price_jobs(asked, {"a": 16, "b": 16}, seconds=10.0).jobs


def test_rounds_by_time_do_not_wait_for_the_slowest_job():
    """Without bits, each job trains at its own speed: 8 samples/s and 4 samples/s."""
    jobs = [JoinedJob("a", 8, 1.0), JoinedJob("b", 8, 2.0)]
    rounds = joined.RoundForecasts(site(0, 0), 0.0, jobs)
    by_time = rounds.by_time()
    assert by_time.seconds == 64 and by_time.steps == (16, 8)  # a fourth of 64 s: 4 fragments
    assert by_time.samples_per_s == pytest.approx(12)
    assert rounds.forecast(*joined.DEFAULT).samples_per_s == pytest.approx(8)
    settings = parse_outer(str(by_time))
    assert settings.seconds == 64 and (settings.fragments, settings.delay) == joined.DEFAULT[1:]


def test_batches_by_speed():
    speeds = {"a": 1.0, "b": 3.0}
    assert joined.shares(site(0, 0), 64, 2, speeds) == {"a": 16, "b": 48}


def test_unequal_clusters_get_rounds_by_time_or_batches_by_speed():
    """GPUs of b are four times as fast: both ways train more than jobs that wait for the slowest."""
    across = first_look(request(1, 1, flops=(1e10, 4e10)), seconds=10.0)
    forecast = beside(across, seconds=10.0)
    default, by_time, by_speed = forecast.choices()[2:]
    assert default.name == "joined jobs" and by_time.loss == by_speed.loss == NOT_MEASURED
    assert by_time.tokens_per_second > 1.2 * default.tokens_per_second
    assert by_speed.tokens_per_second > 1.05 * default.tokens_per_second
    assert by_speed.name == "joined jobs, batches a 8, b 24"
    assert f"--outer {forecast.rounds.by_time()}" in by_time.flags
    equal = beside(first_look(request(1, 1), seconds=10.0), seconds=10.0)
    assert len(equal.choices()) == 3


def test_a_choice_without_measured_loss_is_named_but_not_recommended(capsys):
    """Two jobs of 8 samples/s and 16 samples/s: 16 if the fast one waits or trains alone, 24 if not."""
    slow_and_fast = [JoinedJob("a", 16, 2.0), JoinedJob("b", 16, 1.0)]
    by_speed = [JoinedJob("a", 10, 1.25), JoinedJob("b", 22, 1.375)]

    def rounds_of(jobs):
        return joined.RoundForecasts(site(0, 0), 0.0, jobs)

    forecast = JoinedForecast(rounds_of(slow_and_fast), 100, 1.0, by_speed=rounds_of(by_speed))
    forecast.show()
    text = capsys.readouterr().out
    not_measured = "more tokens/s, but the loss was not measured: joined jobs"
    assert f"{not_measured}, every=64s; add to each job's command" in text
    assert f"{not_measured}, batches a 10, b 22; add to each job's command" in text
    assert "recommended: joined jobs, " not in text and "recommended: one job on b alone" in text
    rates = {choice.name: choice.tokens_per_second for choice in forecast.choices()}
    assert rates["joined jobs, every=64s"] == pytest.approx(2400)
    assert rates["joined jobs, batches a 10, b 22"] == pytest.approx(3200 / 1.375)
