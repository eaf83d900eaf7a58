"""Telemetry and the watchdog on two clusters: its bytes are the interfaces', losses stock's, a stuck step is
told."""

import json
import queue
import re
import signal
from collections import defaultdict

from carriers import ON_GPUS

from holmes_ext.cli.main import main
from holmes_ext.report.files import load
from integration_tests.jobs import SCRIPTS, full, losses, same, train, train_megatron

SIZE = (
    "--layers 4 --hidden 160 --heads 4 --sequence 32 --micro-batch 4 --micro-batches 4 --steps 8 --stages "
    "2".split()
)
MEGATRON = "--layers 4 --hidden 128 --sequence 32 --micro-batch 2".split()
#: TCP's headers and acknowledgements, and what is not an operation (the store, start-up), as a share of the
#: bytes counted.
OVERHEAD = (1.0, 1.2)


def everything(clusters, directory):
    """The flags of all of it."""
    metrics = ("--holmes-metrics", str(directory.parent / "holmes.prom"))
    return (
        *clusters.holmes,
        "--holmes-telemetry",
        str(directory),
        "--holmes-watchdog",
        "2,5",
        *metrics,
    )


def told(directory):
    """MB that telemetry says were sent in all steps: by (cluster, fabric), and by (kind, where, fabric)."""
    run = load(directory)
    by_cluster, by_kind = defaultdict(float), defaultdict(float)
    for one in run.ranks:
        for step in one.steps.values():
            for kind, fabric, where, _, _, sent, _, _ in step["groups"]:
                by_cluster[one.head["cluster"], fabric] += sent / 1e6
                by_kind[kind, where, fabric] += sent / 1e6
    return run, by_cluster, by_kind


def check_bytes(by_cluster, sent):
    """What is said and what the interfaces of a cluster's nodes counted."""
    for cluster, nodes in (("a", ("a0", "a1")), ("b", ("b0", "b1"))):
        fast = sum(mb for node in nodes for nic, mb in sent[node].items() if nic != "eth0")
        ethernet = sum(sent[node]["eth0"] for node in nodes)
        said = by_cluster[cluster, cluster]
        assert said * OVERHEAD[0] <= fast <= said * OVERHEAD[1], (cluster, said, fast)
        said = by_cluster[cluster, "ethernet"]
        # 0.3 MB: the store, the start, small messages' headers
        assert said <= ethernet <= said * 1.2 + 0.3, (cluster, said, ethernet)


def check_report(directory, capsys):
    """The commands work on it; the trace's steps begin together on one axis."""
    out = directory / "trace.json"
    assert main(["report", str(directory), "--json", "--trace", str(out)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in figures["rows"]} >= {"data", "pipeline"} and figures[
        "notes"
    ] == []
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"forward", "backward", "optimizer", "all_reduce"}
    # a GPU ends in a step what the step before has launched
    assert all(
        event["dur"] >= 0 and (ON_GPUS or event["ts"] >= 0)
        for event in events
        if event["ph"] == "X"
    )
    assert len({event["pid"] for event in events}) == 4
    told = (directory.parent / "holmes.prom").read_text()  # of the node that wrote last
    assert (
        re.search(r'holmes_sent_bytes_total{.*kind="pipeline".*} [1-9]', told)
        and "holmes_nic_up{" in told
    )
    return figures


def test_deepspeed(two_clusters, tmp_path, capsys):
    train(two_clusters, tmp_path / "stock", size=SIZE)
    before = two_clusters.lab.counters()
    train(two_clusters, tmp_path / "log", *everything(two_clusters, tmp_path / "tele"), size=SIZE)
    sent = two_clusters.sent(before)
    assert same(losses(tmp_path / "stock"), losses(tmp_path / "log"))
    run, by_cluster, by_kind = told(tmp_path / "tele")
    assert all(len(one.steps) == 8 and one.closed for one in run.ranks)
    check_bytes(by_cluster, sent)
    across = sum(mb for (_, where, _), mb in by_kind.items() if where == "across")
    ethernet = sum(nics["eth0"] for nics in sent.values())
    assert across <= ethernet <= across * 1.2 + 0.6
    # steps x micro-batches x rows x sequence x hidden x 4 bytes, one way
    activations = 8 * 4 * 4 * 32 * 160 * 4 / 1e6
    of_a_pipeline = by_kind["pipeline", "across", "ethernet"] / 2
    assert 2 * activations <= of_a_pipeline < 2.1 * activations  # both ways
    assert by_kind["data", "inside", "a"] > 1 and by_kind["data", "inside", "b"] > 1
    assert not any(kind == "data" and where == "across" for kind, where, _ in by_kind)
    assert check_report(tmp_path / "tele", capsys)["tokens_per_second"] > 0


@full
def test_megatron_core(two_clusters, tmp_path, capsys):
    """Its losses under the watchdog are compared with stock's in megatron/test_core.py."""
    splits = {"pipeline 2": "--pipeline 2 --micro-batches 4 --steps 8"}
    flags = everything(two_clusters, tmp_path / "telemetry")
    _, sent, _ = train_megatron(two_clusters, tmp_path, splits, *flags, model=MEGATRON)
    run, by_cluster, by_kind = told(tmp_path / "telemetry")
    assert all(len(one.steps) == 8 for one in run.ranks)
    check_bytes(by_cluster, sent)
    assert by_kind["data", "inside", "a"] > 1 and by_kind["data", "inside", "b"] > 1
    assert by_kind["pipeline", "across", "ethernet"] > 0.5
    assert not any(kind == "data" and where == "across" for kind, where, _ in by_kind)
    check_report(tmp_path / "telemetry", capsys)


def test_what_holds_a_step_up_is_named(two_clusters):
    """In one run: the fast NIC of b1 carries 0.1 %, then all again, then the launcher's second process (on
    b0: rank 2) is stopped."""
    lines: queue.SimpleQueue = queue.SimpleQueue()
    heard: list[str] = []

    def hear(wanted):
        while not heard or wanted not in heard[-1]:
            heard.append(lines.get(timeout=200))
        return heard[-1]

    rate = next(cluster.rate_bps for cluster in two_clusters.spec.clusters if cluster.name == "b")
    flags = (*two_clusters.holmes, "--holmes-sizes", "pipeline=2", "--holmes-watchdog", "3,4")
    job = two_clusters.start(
        str(SCRIPTS / "steps.py"),
        "100000",
        *flags,
        timeout=400,
        on_line=lambda rank, line, stream: lines.put(line),
    )
    try:
        hear("step 10")
        two_clusters.lab.set_rate("b1", "roce0", rate // 1000)
        line = hear("so far, the median is")
        assert "data group of ranks 2, 3 (all_reduce on b over roce0): all have arrived" in line, (
            line
        )
        assert "the network is slow" in line, line
        assert "rank 3 on b1 moves" in line and "of 1.6 Gb/s" in line, line
        two_clusters.lab.set_rate("b1", "roce0", rate)
        steps = [
            int(found[1]) for found in map(re.compile(r"step (\d+)").fullmatch, heard) if found
        ]
        hear(f"step {max(steps) + 10}")
        job.kill(1, signal.SIGSTOP)
        line = hear("so far, the median is")
        assert "waits for rank 2 on b0, which does not answer: stopped, dead" in line, line
    except queue.Empty:
        raise AssertionError(heard[-20:]) from None
    finally:
        two_clusters.lab.set_rate("b1", "roce0", rate)
        job.kill()
