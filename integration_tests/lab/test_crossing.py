"""Tests labs in which each cluster has its own network, with a delay line between the clusters."""

import json
import os
import signal
from pathlib import Path

import pytest
from clusters import toml
from holmes_lab import Lab
from holmes_lab.network import delay_line

from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError
from integration_tests.jobs import full
from integration_tests.lab.processes import PATIENCE, cli, python

TOML = toml(
    "a ib 2Gb/s a0,a1 uplink=100Mb/s", "b roce 1Gb/s b0", "c ethernet - c0", ethernet="200Mb/s"
) + "".join(
    f'[[between]]\nclusters = {json.dumps(pair)}\nrate = "{rate}"\nlatency = "{latency}"\n'
    for pair, rate, latency in (
        (["a", "b"], "50Mb/s", "20ms"),
        (["a", "c"], "80Mb/s", "5ms"),
        (["b", "c"], "40Mb/s", "1ms"),
    )
)
SPEC = parse_spec(TOML)


@pytest.fixture(scope="module")
def lab():
    with Lab(SPEC, sysctl={"net.ipv4.tcp_slow_start_after_idle": "0"}) as lab:
        yield lab


TALK = """
import os, socket, sys, time
names, rank = sys.argv[1].split(","), int(os.environ["RANK"])
server = socket.create_server(("", 7000))
def reach(name):
    for _ in range(600):
        try:
            return socket.create_connection((name, 7000), timeout=30)
        except ConnectionRefusedError:
            time.sleep(0.05)
found = []
for name in names:
    begin = time.monotonic()
    reach(name).close()
    begin = time.monotonic()
    reach(name).close()
    found.append(time.monotonic() - begin)
print(found, flush=True)
time.sleep(0.5)
"""


def test_every_node_reaches_every_other_and_no_way_is_faster_than_its_latency(lab):
    names = ["a0", "a1", "b0", "c0"]
    result = lab.run(python(TALK, ",".join(names)), order=names)
    assert result.returncode == 0, result.outputs
    trips = {name: json.loads(result.stdout[rank]) for rank, name in enumerate(names)}
    round_trip_s = {"ab": 0.040, "ac": 0.010, "bc": 0.002}  # between two clusters
    for source in names:
        for target, seconds in zip(names, trips[source]):
            pair = "".join(sorted((source[0], target[0])))  # first letters: names of the clusters
            least_s = round_trip_s.get(pair, 0.0)
            assert seconds >= least_s * 0.98, (source, target, seconds)


@full
def test_sysctls_are_set_on_the_nodes_only(lab):
    code = "print(open('/proc/sys/net/ipv4/tcp_slow_start_after_idle').read())"
    assert lab.run(python(code), order=["b0"]).stdout[0].strip() == "0"
    with (
        pytest.raises(HolmesError, match="sysctl net.ipv4.nothing=1: No such file"),
        Lab(SPEC, sysctl={"net.ipv4.nothing": "1"}),
    ):
        pass


@full
def test_two_such_labs_side_by_side(lab):
    with Lab(SPEC) as other:
        job = lab.start(
            python("import socket, time; socket.create_server(('', 7777)); time.sleep(600)"),
            order=["b0"],
        )
        mine = other.run(python(TALK, "a0,b0"), order=["a0", "b0"])
        assert mine.returncode == 0 and job.poll() is None, mine.outputs
        job.kill()
        job.wait(PATIENCE)


def test_without_the_delay_line_the_lab_ends_with_one_line():
    with Lab(SPEC) as lab:
        job = lab.start(python("import time; time.sleep(600)"))
        assert job.pids
        delay_line_pid = lab.delay_line
        directory = lab.directory
        os.kill(delay_line_pid, signal.SIGKILL)
        with pytest.raises(HolmesError, match="delay line was killed"):
            job.wait(PATIENCE)
        with pytest.raises(HolmesError, match="delay line between the clusters has ended"):
            lab.run(["true"])
    assert not Path(f"/proc/{delay_line_pid}").exists() and not directory.exists()


def test_a_machine_without_tun_is_told_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "holmes_lab.process.keeper_process._KEEPER_BOOT",
        """
import os
import sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from holmes_lab.network import delay_line
delay_line.TUN_DEVICE = "/dev/net/absent"
from holmes_lab.process.keeper import main
main(sys.argv[2:])
""",
    )
    assert delay_line.TUN_DEVICE == "/dev/net/tun"
    with (
        pytest.raises(
            HolmesError,
            match=r"need TUN/TAP: /dev/net/absent: No such file .*--device "
            r"/dev/net/tun",
        ),
        Lab(SPEC),
    ):
        pass


@full
def test_measure_shows_every_pair_of_clusters(tmp_path):
    """A busy machine may make a link slower than configured (status 1), but never faster."""
    file = tmp_path / "cluster.toml"
    file.write_text(TOML)
    process = cli("measure", "--cluster", "FILE", "--json", toml=file)
    out, errors = process.communicate(timeout=4 * PATIENCE)
    rows = json.loads(out)["between"]
    assert {tuple(row["clusters"]) for row in rows} == {("a", "b"), ("a", "c"), ("b", "c")}
    configured = {(*row["clusters"], row["what"]): row["configured"] for row in rows}
    assert configured["a", "b", "round trip"] == 0.04 and configured["a", "b", "1 pair"] == 50e6
    for row in rows:
        ratio = row["achieved"] / row["configured"]
        if row["what"] == "round trip":
            assert ratio > 0.9, row
        else:
            assert ratio < 1.1, row
    assert process.returncode in (0, 1), errors
