"""--holmes-metrics: what Prometheus reads, over a port and from a file; what is refused, in one line."""

import json
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.watch import start_stop
from holmes_ext.runtime.watch.metrics import FAMILIES, Collector, open_metrics

ROOT = Path(__file__).parents[3]
PORTS = (Port("ethernet", "lo", rate_bps=10**9),)
SITE = Site((Node("a0", "a", 1, PORTS),), (Fabric("ethernet", "ethernet", 10**9, 1e-4),))
ALONE = Process(0, 1, 0, 1, "127.0.0.1", 0, "test")
STEP = {
    "step": 3,
    "begin": 10.0,
    "end": 12.0,
    "tokens": 64,
    "reduction": {"exposed": 0.25},
    "groups": [["data", "ib", "inside", 2, 400, 300, 1.5, 0.5]],
    "between": [["a", "b", 130, 0.5]],
}
ROUND = {"outer": {"round": 1, "verdict": "commit", "bytes": 1000, "seconds": 3.0, "exposed": 0.1}}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def job():
    """Return a function that makes the job of one process with its metrics at a place.

    The job ends after the test.
    """

    def begin(place):
        options = Options(metrics=str(place))
        current = session.Session(
            options, ALONE, SITE, Plan(SITE.digest, ("a0",), 1), 0, maker=maker
        )
        session.set_active(current)
        return start_stop.start(current, open_metrics(options, ALONE))

    yield begin
    start_stop.stop()
    session.set_active(None)


def values(text):
    """{"name{labels}": value} of the text format; "# TYPE" of every metric is there."""
    assert set(re.findall(r"# TYPE (\S+)", text)) <= {
        *FAMILIES,
        *(name.removesuffix("_total") for name in FAMILIES),
    }
    return {
        name: float(value) for name, value in re.findall(r"^([a-z]\S*) (\S+)$", text, re.MULTILINE)
    }


def train(steps):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        weight.grad = torch.ones(2)
        optimizer.step()


def test_prometheus_asks_a_port(job):
    port = free_port()
    (line,) = job(f"127.0.0.1:{port}")
    assert line == f"metrics: http://127.0.0.1:{port}/metrics, of local rank 0 on every node"
    train(3)
    start_stop._Running.writer.close()  # the thread that takes the steps is done with them
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = values(answer.read().decode())
    by_name = {name.split("{")[0]: value for name, value in found.items()}
    assert by_name["holmes_steps_total"] == 3 and by_name["holmes_step_seconds_total"] > 0
    assert all('node="a0"' in name and 'cluster="a"' in name for name in found)
    assert by_name["holmes_nic_up"] == 1 and by_name["holmes_fabric_bits_per_second"] == 1e9
    start_stop.stop()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_the_textfile_collector_reads_a_file(job, tmp_path):
    job(tmp_path / "holmes.prom")
    train(4)
    start_stop.stop()
    found = {
        name.split("{")[0]: value
        for name, value in values((tmp_path / "holmes.prom").read_text()).items()
    }
    assert found["holmes_steps_total"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["holmes.prom"]


def test_sums_of_steps_and_rounds(job, tmp_path):
    job(tmp_path / "x.prom")
    collector = Collector()
    for document in (STEP, STEP, ROUND, {"clock": [0, 0]}):
        collector.take(document)
    found = {
        sample.name: (sample.labels, sample.value)
        for family in collector.collect()
        for sample in family.samples
    }
    assert found["holmes_steps_total"][1] == 2 and found["holmes_tokens_total"][1] == 128
    assert (
        found["holmes_last_step_seconds"][1] == 2.0
        and found["holmes_reducer_exposed_seconds_total"][1] == 0.5
    )
    assert found["holmes_exposed_seconds_total"] == (
        {"node": "a0", "cluster": "a", "kind": "data", "where": "inside", "fabric": "ib"},
        1.0,
    )
    assert (
        found["holmes_sent_bytes_total"][1] == 600
        and found["holmes_under_way_seconds_total"][1] == 3.0
    )
    assert found["holmes_between_sent_bytes_total"][1] == 260
    assert found["holmes_between_exposed_seconds_total"][0]["to"] == "b"
    assert found["holmes_rounds_total"] == ({"node": "a0", "cluster": "a", "verdict": "commit"}, 1)
    assert found["holmes_round_sent_bytes_total"][1] == 1000
    assert set(found) <= set(FAMILIES)


def test_bad_input_is_one_line(tmp_path, monkeypatch):
    for text in ("", "0", "65536", "nine", "host:", "metrics.txt"):
        if text:
            with pytest.raises(
                HolmesError, match="--holmes-metrics: .* neither PORT nor HOST:PORT"
            ):
                Options(metrics=text)
    with pytest.raises(HolmesError, match="is no folder that can be written"):
        open_metrics(Options(metrics=str(tmp_path / "none" / "x.prom")), ALONE)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            HolmesError, match=f"127.0.0.1:{port} cannot be listened on .Address already in use."
        ):
            open_metrics(Options(metrics=f"127.0.0.1:{port}"), ALONE)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(HolmesError, match="not installed; pip install 'holmes_ext.metrics.'"):
        open_metrics(Options(metrics="9400"), ALONE)


def test_a_port_that_is_taken_ends_the_job_with_status_2(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = ["--holmes", "--holmes-metrics", f"127.0.0.1:{taken.getsockname()[1]}"]
        command = [sys.executable, "-m", "holmes_ext", str(tmp_path / "train.py"), *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and not ended.stdout, ended.stderr
    assert ended.stderr.startswith("holmes: ") and ended.stderr.count("\n") == 1, ended.stderr
    assert "cannot be listened on" in ended.stderr


def test_one_rank_of_a_node_tells_and_nobody_by_default():
    assert open_metrics(Options(), ALONE) is None
    assert open_metrics(Options(metrics="9400"), Process(1, 2, 1, 2, "a0", 1, "test")) is None


def test_a_disk_that_fills_ends_the_file_not_the_job(capsys, tmp_path):
    told = open_metrics(Options(metrics=str(tmp_path / "x.prom")), ALONE)

    def full():
        raise OSError(28, "No space left on device")

    told._write = full
    told.take(STEP)
    told.take(STEP)
    told.close()
    err = capsys.readouterr().err
    assert (
        "no more metrics (No space left on device); all else goes on" in err
        and err.count("\n") == 1
    )


def test_the_example_dashboard_asks_for_metrics_that_there_are():
    document = json.loads((ROOT / "examples/metrics/dashboard.json").read_text())
    asked = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    used = set(re.findall(r"holmes_\w+", " ".join(asked)))
    assert len(asked) > 8 and used <= set(FAMILIES)
    shown = " ".join((ROOT / "docs/step.md").read_text().split())
    assert all(f"| `{name}` |" in shown for name in FAMILIES)
