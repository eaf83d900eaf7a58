"""A plan that learns while the job runs: over a long link it takes more micro-batches in flight than it began
with, on all ranks at one step, and the losses are stock's. Nobody told it of a model; of the link it was
told, so that how much a change brings does not hang on this machine's rates.
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
    """(micro-batches in flight, seconds of a step then and before) of the one change that rank 0 told."""
    found = re.findall(CHANGED, text)
    assert len(found) == 1 and "; reverted" not in text, text
    return int(found[0][0]), *map(float, found[0][1:])


def test_deepspeeds_pipeline_learns(far_apart, tmp_path, capsys):
    flags = ("--stages", "2")
    train(far_apart, tmp_path / "stock", *flags, size=SIZE, env={"GLOO_SOCKET_IFNAME": "eth0"})
    telemetry = tmp_path / "telemetry"
    more = ("--holmes-telemetry", str(telemetry))
    text = train(far_apart, tmp_path / "learned", *flags, *far_apart.holmes, *more, size=SIZE)
    held, now, before = changed(text)
    assert held > 2 and now < before
    assert same(losses(tmp_path / "stock"), losses(tmp_path / "learned"))
    run = load(telemetry)
    (plan,) = run.ranks[0].plans
    assert plan["in_flight"] == [held, 1] and 3 <= plan["step"] < 9
    model = tmp_path / "model.json"
    assert main(["report", str(telemetry), "--write-model", str(model)]) == 0
    assert f"{held}+1" in capsys.readouterr().out
    planned = ("--sizes", "pipeline=2", "--profile", str(model))
    assert (
        main(
            [
                "plan",
                "--cluster",
                str(far_apart.file),
                *planned,
                "--output",
                str(tmp_path / "plan.json"),
            ]
        )
        == 0
    )


def test_megatron_core_learns(far_apart, tmp_path):
    split = {"pipeline 2": f"--pipeline 2 --micro-batches 8 --steps {STEPS}"}
    runs = []
    for name, flags, env in (
        ("stock", (), {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("learned", far_apart.holmes, {}),
    ):
        (tmp_path / name).mkdir()
        runs.append(train_megatron(far_apart, tmp_path / name, split, *flags, **env))
    assert changed(runs[1][2])[0] > 2
    stock, learned = (
        [entry["loss"] for entry in done["pipeline 2"]["entries"]] for done, _, _ in runs
    )
    assert len(stock) == STEPS and same(stock, learned)


@pytest.mark.parametrize("how", ["report", "off"])
def test_what_it_would_do_is_told_or_left(far_apart, tmp_path, how):
    flags = ("--stages", "2", *far_apart.holmes, "--holmes-adapt", how)
    text = train(far_apart, tmp_path / how, *flags, size=SIZE)
    assert not re.search(CHANGED, text)
    told = re.findall(
        r"holmes: with \d\+1 micro-batches in flight \(were 2\+1\) a step would take", text
    )
    assert bool(told) == (how == "report"), text
