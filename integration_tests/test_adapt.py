"""Tests that holmes changes the number of micro-batches in flight while a job runs.

Over a long link, more micro-batches in flight make steps faster. All ranks must change at the same step,
and the losses must be those without holmes. Holmes gets no description of the model. The cluster file
describes the link, so that the expected gain does not depend on this machine's speed.
"""

import re

import pytest

from holmes_ext.cli.main import main
from holmes_ext.report.files import load
from integration_tests.jobs import CLUSTER, lab_fixture, losses, same, train, train_megatron

LINK = """
[[between]]
clusters = ["a", "b"]
rate = "100Mb/s"
latency = "40ms"
"""
STEPS = 11
SIZE = (
    "--layers 4 --hidden 64 --heads 4 --sequence 16 "
    f"--micro-batch 1 --micro-batches 8 --steps {STEPS}"
).split()
CHANGED = r"holmes: (\d+)\+1 micro-batches in flight \(were 2\+1\): a step takes ([\d.]+) s, it took ([\d.]+)"
far_apart = lab_fixture(CLUSTER.read_text() + LINK)


def changed(text):
    """Return the values of the one change that rank 0 printed.

    Returns:
        Micro-batches in flight of the first stage; seconds of a step after the change and before it.
    """
    [(in_flight, seconds_after, seconds_before)] = re.findall(CHANGED, text)
    assert "; reverted" not in text, text
    return int(in_flight), float(seconds_after), float(seconds_before)


@pytest.mark.full(share=4)
def test_deepspeeds_pipeline_learns(far_apart, tmp_path, capsys):
    flags = ("--stages", "2")
    train(far_apart, tmp_path / "stock", *flags, size=SIZE, env={"GLOO_SOCKET_IFNAME": "eth0"})
    telemetry = tmp_path / "telemetry"
    more = ("--holmes-telemetry", str(telemetry))
    text = train(far_apart, tmp_path / "learned", *flags, *far_apart.holmes, *more, size=SIZE)
    in_flight, seconds_after, seconds_before = changed(text)
    assert in_flight > 2 and seconds_after < seconds_before
    assert same(losses(tmp_path / "stock"), losses(tmp_path / "learned"))
    run = load(telemetry)
    (plan,) = run.ranks[0].plans
    assert plan["in_flight"] == [in_flight, 1] and 3 <= plan["step"] < 9
    model = tmp_path / "model.json"
    assert main(["report", str(telemetry), "--write-model", str(model)]) == 0
    assert f"{in_flight}+1" in capsys.readouterr().out
    command = ["plan", "--cluster", str(far_apart.file), "--sizes", "pipeline=2"]
    output = ["--output", str(tmp_path / "plan.json")]
    assert main([*command, "--profile", str(model), *output]) == 0


@pytest.mark.full(share=4)
def test_megatron_core_learns(far_apart, tmp_path):
    split = {"pipeline 2": f"--pipeline 2 --micro-batches 8 --steps {STEPS}"}
    runs = []
    for name, flags, env in (
        ("stock", (), {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("learned", far_apart.holmes, {}),
    ):
        (tmp_path / name).mkdir()
        runs.append(train_megatron(far_apart, tmp_path / name, split, *flags, **env))
    (stock_results, _, _), (results, _, output) = runs
    in_flight, _, _ = changed(output)
    assert in_flight > 2
    stock = [entry["loss"] for entry in stock_results["pipeline 2"]["entries"]]
    learned = [entry["loss"] for entry in results["pipeline 2"]["entries"]]
    assert len(stock) == STEPS and same(stock, learned)


@pytest.mark.parametrize("how", ["report", "off"])
def test_what_it_would_do_is_told_or_left(far_apart, tmp_path, how):
    flags = ("--stages", "2", *far_apart.holmes, "--holmes-adapt", how)
    text = train(far_apart, tmp_path / how, *flags, size=SIZE)
    assert not re.search(CHANGED, text)
    advice = r"holmes: with \d\+1 micro-batches in flight \(were 2\+1\) a step would take"
    assert bool(re.search(advice, text)) == (how == "report"), text
