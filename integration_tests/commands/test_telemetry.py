"""Tests telemetry and the watchdog in jobs on two emulated clusters.

The bytes in the telemetry files must agree with the counters of the network interfaces, the losses must equal
those without holmes, and the watchdog must name the cause of a step that takes too long.
"""

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
#: Smallest and largest ratio of the bytes that an interface counts to those that telemetry records.
#: Interfaces also count TCP's headers and acknowledgements, the store and the start of the job.
OVERHEAD = (1.0, 1.2)


def telemetry_flags(clusters, directory):
    """Return the flags that switch on telemetry, its metrics file and the watchdog."""
    metrics = ("--holmes-metrics", str(directory.parent / "holmes.prom"))
    return (
        *clusters.holmes,
        "--holmes-telemetry",
        str(directory),
        "--holmes-watchdog",
        "2,5",
        *metrics,
    )


def sent_mb_of(directory):
    """Return the telemetry of a job, and sums of the MB that its ranks sent in all steps.

    Returns:
        The loaded telemetry; MB by (cluster, fabric); MB by (kind of group, "inside" or "across", fabric).
    """
    run = load(directory)
    mb_by_cluster = defaultdict(float)
    mb_by_kind = defaultdict(float)
    for rank in run.ranks:
        for step in rank.steps.values():
            for kind, fabric, where, _, _, sent_bytes, _, _ in step["groups"]:
                mb_by_cluster[rank.head["cluster"], fabric] += sent_bytes / 1e6
                mb_by_kind[kind, where, fabric] += sent_bytes / 1e6
    return run, mb_by_cluster, mb_by_kind


def check_bytes(mb_by_cluster, counted):
    """Assert that telemetry's MB agree with the counters of the network interfaces, in each cluster.

    Args:
        mb_by_cluster: (cluster, fabric) -> MB by telemetry.
        counted: Node -> name of its interface -> MB sent by the interface's counter.
    """
    least, most = OVERHEAD
    for cluster, nodes in (("a", ("a0", "a1")), ("b", ("b0", "b1"))):
        fast = sum(mb for node in nodes for nic, mb in counted[node].items() if nic != "eth0")
        recorded = mb_by_cluster[cluster, cluster]  # a cluster's fast fabric has the cluster's name
        assert recorded * least <= fast <= recorded * most, (cluster, recorded, fast)

        ethernet = sum(counted[node]["eth0"] for node in nodes)
        recorded = mb_by_cluster[cluster, "ethernet"]
        # 0.3 MB: the store, the start, headers of small messages
        assert recorded <= ethernet <= recorded * most + 0.3, (cluster, recorded, ethernet)


def check_report(directory, capsys):
    """Assert that `holmes report` reads the telemetry, and return its figures.

    Its trace must have events of all four ranks, which begin at the same time on one axis.
    """
    out = directory / "trace.json"
    assert main(["report", str(directory), "--json", "--trace", str(out)]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in figures["rows"]} >= {"data", "pipeline"} and figures[
        "notes"
    ] == []
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["name"] for event in events} >= {"forward", "backward", "optimizer", "all_reduce"}
    # A GPU may run kernels that the step before launched, so its events may begin before the first step.
    assert all(
        event["dur"] >= 0 and (ON_GPUS or event["ts"] >= 0)
        for event in events
        if event["ph"] == "X"
    )
    assert len({event["pid"] for event in events}) == 4
    metrics = (directory.parent / "holmes.prom").read_text()  # of the node that wrote last
    assert re.search(r'holmes_sent_bytes_total{.*kind="pipeline".*} [1-9]', metrics)
    assert "holmes_nic_up{" in metrics
    return figures


def test_deepspeed(two_clusters, tmp_path, capsys):
    train(two_clusters, tmp_path / "stock", size=SIZE)
    before = two_clusters.lab.counters()
    flags = telemetry_flags(two_clusters, tmp_path / "tele")
    train(two_clusters, tmp_path / "log", *flags, size=SIZE)
    sent = two_clusters.sent(before)
    assert same(losses(tmp_path / "stock"), losses(tmp_path / "log"))

    run, mb_by_cluster, mb_by_kind = sent_mb_of(tmp_path / "tele")
    assert all(len(rank.steps) == 8 and rank.closed for rank in run.ranks)
    check_bytes(mb_by_cluster, sent)
    across_mb = sum(mb for (_, where, _), mb in mb_by_kind.items() if where == "across")
    ethernet_mb = sum(nics["eth0"] for nics in sent.values())
    assert across_mb <= ethernet_mb <= across_mb * 1.2 + 0.6

    # steps x micro-batches x rows x sequence x hidden x 4 bytes
    activations_mb = 8 * 4 * 4 * 32 * 160 * 4 / 1e6
    mb_of_a_pipeline = mb_by_kind["pipeline", "across", "ethernet"] / 2  # of two pipelines
    # Activations travel forward, and gradients of the same size backward.
    assert 2 * activations_mb <= mb_of_a_pipeline < 2.1 * activations_mb
    assert mb_by_kind["data", "inside", "a"] > 1 and mb_by_kind["data", "inside", "b"] > 1
    assert not any(kind == "data" and where == "across" for kind, where, _ in mb_by_kind)
    assert check_report(tmp_path / "tele", capsys)["tokens_per_second"] > 0


@full
def test_megatron_core(two_clusters, tmp_path, capsys):
    """Telemetry agrees with the interfaces' counters; megatron/test_core.py compares the losses."""
    splits = {"pipeline 2": "--pipeline 2 --micro-batches 4 --steps 8"}
    flags = telemetry_flags(two_clusters, tmp_path / "telemetry")
    _, sent, _ = train_megatron(two_clusters, tmp_path, splits, *flags, model=MEGATRON)
    run, mb_by_cluster, mb_by_kind = sent_mb_of(tmp_path / "telemetry")
    assert all(len(rank.steps) == 8 for rank in run.ranks)
    check_bytes(mb_by_cluster, sent)
    assert mb_by_kind["data", "inside", "a"] > 1 and mb_by_kind["data", "inside", "b"] > 1
    assert mb_by_kind["pipeline", "across", "ethernet"] > 0.5
    assert not any(kind == "data" and where == "across" for kind, where, _ in mb_by_kind)
    check_report(tmp_path / "telemetry", capsys)


def test_what_holds_a_step_up_is_named(two_clusters):
    """The watchdog names the cause of a slow step: first a slow NIC, then a process that is stopped.

    The fast NIC of b1 runs at 0.1 % of its rate, then at its rate again. After that the launcher's second
    process (rank 2, on b0) is stopped.
    """
    new_lines: queue.SimpleQueue = queue.SimpleQueue()
    lines: list[str] = []  # all lines that the job has printed so far

    def wait_for_line(wanted):
        while not lines or wanted not in lines[-1]:
            lines.append(new_lines.get(timeout=200))
        return lines[-1]

    rate = next(cluster.rate_bps for cluster in two_clusters.spec.clusters if cluster.name == "b")
    flags = (*two_clusters.holmes, "--holmes-sizes", "pipeline=2", "--holmes-watchdog", "3,4")
    job = two_clusters.start(
        str(SCRIPTS / "steps.py"),
        "100000",
        *flags,
        timeout=400,
        on_line=lambda rank, line, stream: new_lines.put(line),
    )
    try:
        wait_for_line("step 10")
        two_clusters.lab.set_rate("b1", "roce0", rate // 1000)
        line = wait_for_line("so far, the median is")
        assert "data group of ranks 2, 3 (all_reduce on b over roce0): all have arrived" in line, (
            line
        )
        assert "the network is slow" in line, line
        assert "rank 3 on b1 moves" in line and "of 1.6 Gb/s" in line, line
        two_clusters.lab.set_rate("b1", "roce0", rate)
        matches = [re.fullmatch(r"step (\d+)", line) for line in lines]
        last_step = max(int(match[1]) for match in matches if match)
        wait_for_line(f"step {last_step + 10}")
        job.kill(1, signal.SIGSTOP)
        line = wait_for_line("so far, the median is")
        assert "waits for rank 2 on b0, which does not answer: stopped, dead" in line, line
    except queue.Empty:
        raise AssertionError(lines[-20:]) from None
    finally:
        two_clusters.lab.set_rate("b1", "roce0", rate)
        job.kill()
