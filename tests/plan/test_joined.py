"""What joined jobs over the links of a cluster.toml would take (plan/joined.py), by hand."""

import json

import pytest

from holmes_ext.cli.main import main
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.plan import joined
from holmes_ext.runtime.outer.settings import OuterSettings, parse_outer

SITE = """version = 2
[ethernet]
rate = "10Gb/s"
{clusters}
{between}
"""
CLUSTER = '[[cluster]]\nname = "{0}"\nkind = "ib"\nrate = "100Gb/s"\nnodes = ["{0}[0-{1}]"]\nprocesses = 2\n'
BETWEEN = '[[between]]\nclusters = ["{}", "{}"]\nrate = "1Gb/s"\nlatency = "50ms"\n'


def site(*last_nodes, flat=False):
    names = "abc"[: len(last_nodes)]
    clusters = "".join(map(CLUSTER.format, names, last_nodes))
    pairs = [(x, y) for x in names for y in names if x < y]
    return site_from_spec(parse_spec(SITE.format(
        clusters=clusters, between="" if flat else "".join(BETWEEN.format(*pair) for pair in pairs)), "c.toml"))


def test_seconds_of_a_round():
    two, bits = site(0, 0), 16 * 5e8 / 4  # bf16, four fragments
    assert joined.round_seconds(two, 5e8, 4) == pytest.approx(bits / 1e9 + 3 * 2 * 0.05)
    assert joined.round_seconds(two, 5e8, 4, "off") == pytest.approx(2 * bits / 1e9 + 0.3)
    assert joined.round_seconds(site(0, 0, 0), 5e8, 4) == pytest.approx(bits / 1e9 + 0.3)  # a link for each pair
    assert joined.round_seconds(site(0, 1, flat=True), 5e8, 4) == pytest.approx(bits / 10e9, rel=1e-3)  # a's one NIC


@pytest.mark.parametrize("step_s", [0.02, 0.1, 1.0, 30.0])
def test_what_is_said_to_be_hidden_is_and_can_be_asked_for(step_s):
    """5 * 10^8 parameters over 1 Gb/s: 8 s of bits."""
    jobs = [joined.JoinedJob("a", 8, step_s / 2), joined.JoinedJob("b", 8, step_s)]
    default, *hidden = joined.settings(site(0, 0), 5e8, jobs)
    given = OuterSettings()
    assert (default.every, default.fragments, default.delay) == (given.every, given.fragments, given.delay)
    assert default.exposed_s == pytest.approx(max(0, default.round_s - 5 * step_s) / 8)
    assert default.samples_per_s == pytest.approx(16 / (step_s + default.exposed_s))
    assert len(hidden) == (2 if step_s > 0.06 else 1), "with 5 steps of delay the trips alone must fit"
    for one in hidden:
        assert not one.exposed_s and one.samples_per_s == pytest.approx(16 / step_s)
        assert parse_outer(str(one)).period == one.delay + 1
        assert one.round_s <= one.delay * step_s * (1 + 1e-9)


def test_samples_go_by_ranks_in_whole_micro_batches():
    assert joined.shares(site(0, 2), 64, 2) == {"a": 16, "b": 48}
    assert joined.shares(site(0, 2), 2, 2) == {"a": 2, "b": 2}
    assert {node.cluster for node in joined.apart(site(0, 2), "b").nodes} == {"b"}


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
    found = []
    for name, last in (("two", (1, 1)), ("one", (1,))):
        names = "ab"[: len(last)]
        between = BETWEEN.format("a", "b") if len(last) > 1 else ""
        (tmp_path / f"{name}.toml").write_text(
            SITE.format(clusters="".join(map(CLUSTER.format, names, last)), between=between))
        arguments = ["plan", "--cluster", str(tmp_path / f"{name}.toml"), "--model", str(tmp_path / "model.toml")]
        found.append((main([*arguments, "--joined", "--seconds", "5"]), *capsys.readouterr()))
    assert found[0][0] == 0 and "nothing is exposed from every=" in found[0][1]
    assert found[1][0] == 2 and "--joined needs two clusters or more; it has 1" in found[1][2]
    assert main(["plan", "--cluster", str(tmp_path / "two.toml"), "--model", str(tmp_path / "model.toml"), "--joined",
                 "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["joined"]
    assert [job["cluster"] for job in told["jobs"]] == ["a", "b"] and told["settings"][0]["every"] == 32
