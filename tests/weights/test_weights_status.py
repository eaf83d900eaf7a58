"""`holmes weights status`, metrics and the progress bar: what users see of versions and hosts."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
import urllib.request

import pytest
from weights_runs import _CODE, Process, environment, free_port, holmes, until

from holmes_ext.weights.monitor import FAMILIES, Monitor, metric_values

MB = 10**6


def host(name="h0", site="east", address="10.0.0.1:1", **more):
    """Return the state of a host, as Sites.status() does."""
    state = {
        "site": site,
        "host": name,
        "address": address,
        "current": None,
        "newest": None,
        "receiving": None,
        "received_bytes": 0,
        "size_bytes": 0,
        "wan_bytes": 0,
        "site_bytes": 0,
        "heard_s": 0.0,
    }
    return {**state, **more}


def service_status(*hosts, versions=(), **more):
    state = {"versions": list(versions), "current": None, "wanted": None, "sent_bytes": {}}
    return {**state, "hosts": [dict(each) for each in hosts], **more}


def test_rate_over_the_last_samples():
    hosts = [host(), host(address="10.0.0.2:1", wan_bytes=5)]
    monitor = Monitor(lambda: service_status(*hosts), lambda version: None)
    assert [each["bits_per_second"] for each in monitor.status()["hosts"]] == [0, 0]
    for second, received in enumerate((0, 1000, 4000, 9000)):
        hosts[0]["wan_bytes"] = received // 2
        hosts[0]["site_bytes"] = received - received // 2
        monitor.sample(float(second))
    assert [each["bits_per_second"] for each in monitor.status()["hosts"]] == [8 * 4000, 0]
    hosts.pop()
    monitor.sample(4.0)
    assert monitor.status()["hosts"][0]["bits_per_second"] == 8 * 2500


def test_lag_is_that_of_the_oldest_version_which_a_host_lacks(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    published = {1: 900.0, 2: 940.0, 3: 970.0, 5: 990.0}
    hosts = [host(newest=newest, address=f"h:{newest}") for newest in (None, 1, 2, 5)]
    status = service_status(*hosts, versions=published)
    lags = [each["lag_s"] for each in Monitor(lambda: status, published.get).status()["hosts"]]
    assert lags == [100.0, 60.0, 30.0, 0.0]
    del published[1]  # it was removed from the store a moment ago
    status = service_status(*hosts, versions=(1, 2, 3, 5))
    assert Monitor(lambda: status, published.get).status()["hosts"][0]["lag_s"] == 60.0


def test_metrics_of_hosts_with_the_same_name_are_added():
    rate_and_lag = {"bits_per_second": 8, "lag_s": 2.0}
    hosts = [
        host(newest=3, current=2, wan_bytes=10, **rate_and_lag),
        host(newest=2, current=2, site_bytes=7, bits_per_second=1, lag_s=5.0),
        host(name="h1", site="west", **rate_and_lag),
    ]
    more = {"current": 2, "wanted": 3, "sent_bytes": {"east": 10}}
    values = metric_values(service_status(*hosts, versions=(2, 3), **more))
    assert set(values) == set(FAMILIES)
    assert values["holmes_weights_published_version"] == {(): 3}
    assert values["holmes_weights_committed_version"] == {(): 2}
    assert values["holmes_weights_sent_bytes_total"] == {("east",): 10}
    assert values["holmes_weights_staged_version"] == {("east", "h0"): 2}
    assert values["holmes_weights_lag_seconds"] == {("east", "h0"): 5.0, ("west", "h1"): 2.0}
    assert values["holmes_weights_receive_bits_per_second"][("east", "h0")] == 9
    assert values["holmes_weights_received_bytes_total"] == {
        ("east", "h0", "wan"): 10,
        ("east", "h0", "site"): 7,
        ("west", "h1", "wan"): 0,
        ("west", "h1", "site"): 0,
    }
    assert set(metric_values(service_status())) <= set(FAMILIES)  # before the first version


class Run:
    """A coordinator that exports metrics, and a folder to publish."""

    def __init__(self, folder):
        self.home = folder / "home"
        self.port = free_port()
        self.metrics_port = free_port()
        self.made = folder / "made"
        self.made.mkdir()
        (self.made / "model.bin").write_bytes(os.urandom(3 * MB))
        variables = {"HOLMES_WEIGHTS_METRICS": str(self.metrics_port)}
        arguments = ("join", "serve", "--host", "127.0.0.1", "--port", self.port)
        self.serve = Process(*arguments, home=self.home, **variables)
        until(lambda: any("jobs meet" in line for line in self.serve.lines), 60)

    def publish(self, version, *arguments):
        command = ("weights", "publish", self.made, "--version", version, "--port", self.port)
        result = holmes(self.home, *command, *arguments)
        assert result.returncode == 0, result.stderr

    def receive(self, directory, *arguments):
        join = ("--join", f"east@127.0.0.1:{self.port}")
        return ("weights", "receive", directory, *join, *arguments)

    def status(self, *arguments):
        result = holmes(self.home, "weights", "status", f"127.0.0.1:{self.port}", *arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def hosts(self):
        return json.loads(self.status("--json"))["hosts"]

    def metrics(self):
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        return dict(re.findall(r"^(holmes\S+) (\S+)$", text, re.MULTILINE))


@pytest.fixture
def run(tmp_path):
    running = Run(tmp_path)
    yield running
    running.serve.kill()


def test_status_and_metrics_of_a_run(run, tmp_path, request):
    assert "0 versions published" in run.status()
    request.addfinalizer(Process(*run.receive(tmp_path / "e"), home=run.home).kill)
    run.publish(1)
    run.publish(2, "--stage")
    until(lambda: [each["newest"] for each in run.hosts()] == [2], 60)
    text = run.status()
    assert "2 versions published, the newest is 2; 1 is committed\n" in text
    header, row = (line for line in text.splitlines() if "east" in line or "site" in line[:6])
    assert header.split()[:5] == ["site", "host", "in", "use", "complete"]
    assert row.split()[0] == "east" and row.split()[2:4] == ["1", "2"] and "6 MB" in row
    found = run.metrics()
    hostname = os.uname().nodename
    labels = f'{{host="{hostname}",site="east"}}'
    assert found[f"holmes_weights_staged_version{labels}"] == "2.0"
    assert found[f"holmes_weights_current_version{labels}"] == "1.0"
    assert found[f"holmes_weights_lag_seconds{labels}"] == "0.0"
    assert float(found['holmes_weights_sent_bytes_total{site="east"}']) == 6 * MB
    wan = f'holmes_weights_received_bytes_total{{host="{hostname}",site="east",source="wan"}}'
    assert float(found[wan]) == 6 * MB


def test_metrics_that_cannot_be_exported(tmp_path):
    for text, message in (
        ("metrics.txt", "HOLMES_WEIGHTS_METRICS: 'metrics.txt' is neither PORT nor HOST:PORT"),
        (str(tmp_path / "none" / "x.prom"), "is no folder that can be written"),
    ):
        arguments = ("join", "serve", "--host", "127.0.0.1", "--port", free_port())
        serve = Process(*arguments, home=tmp_path, HOLMES_WEIGHTS_METRICS=text)
        assert serve.wait() == 2
        assert message in serve.lines[-1], serve.lines
        assert not any("Traceback" in line for line in serve.lines)


def terminal_output(command, home):
    """Return what a command writes to standard error, which is a terminal, and to standard output, a pipe."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=child,
        env={**environment(home), "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(child)
    parts = []

    def read():
        try:
            while part := os.read(parent, 4096):
                parts.append(part)
        except OSError:  # the end of a terminal
            pass

    reader = threading.Thread(target=read)
    reader.start()
    output, _ = process.communicate(timeout=30)
    reader.join()
    os.close(parent)
    assert process.returncode == 0
    return b"".join(parts).decode(), output.decode()


def test_a_progress_bar_for_each_version_on_a_terminal_only(run, tmp_path):
    run.publish(1)
    run.publish(2, "--parent", "1")
    limit = ("--rate", "16Mb/s", "--once")  # 1.5 s for each version
    shown, output = terminal_output(run.receive(tmp_path / "e", *limit), run.home)
    assert "version 1 ━" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "version 2 ━" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "━" not in output and output.count("is staged") == 2  # the events are in the pipe
    quiet, _ = terminal_output(run.receive(tmp_path / "q", *limit, "--json"), run.home)
    assert quiet == ""
    piped = holmes(run.home, *run.receive(tmp_path / "p", "--once"))
    assert piped.returncode == 0 and piped.stderr == ""


def test_a_folder_with_versions_of_another_run_is_refused(run, tmp_path):
    run.publish(1)
    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other")
    other.publish(1)
    try:
        for _ in range(2):  # also a second time with the same run
            result = holmes(run.home, *run.receive(tmp_path / "e", "--once"))
            assert result.returncode == 0, result.stderr
        refused = holmes(other.home, *other.receive(tmp_path / "e", "--once"))
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr
        assert "has versions of another run" in refused.stderr
        assert (tmp_path / "e" / "1" / "model.bin").read_bytes() == (
            run.made / "model.bin"
        ).read_bytes()
    finally:
        other.serve.kill()
