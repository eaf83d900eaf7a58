import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from holmes_ext.cluster.spec import load_spec
from holmes_ext.errors import HolmesError
from holmes_ext.runtime.start.launcher import check_hosts, launched_hosts

HOSTS = {"a0": 1, "b0": 1, "a1": 1, "b1": 1}


@pytest.fixture(scope="module")
def spec():
    return load_spec(Path(__file__).parents[3] / "examples" / "clusters" / "two_clusters_4.toml")


def world_info(hosts):
    return base64.urlsafe_b64encode(
        json.dumps({host: list(range(count)) for host, count in hosts.items()}).encode()
    ).decode()


@pytest.mark.parametrize(
    "arguments, hosts",
    [
        ([f"--world_info={world_info(HOSTS)}"], HOSTS),
        (["--world_info", world_info({"a0": 8})], {"a0": 8}),
        (["--world_info=W10="], {}),  # [] in base64: not the launcher's
        (["--world_info=?"], {}),
        ([], {}),
    ],
)
def test_the_hosts_stand_in_the_launchers_command_line(arguments, hosts):
    code = "print('up', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert (
            child.stdout.readline() == b"up\n"
        )  # while exec runs, the kernel shows an empty command line
        assert launched_hosts(child.pid) == hosts and list(launched_hosts(child.pid)) == list(hosts)
    finally:
        child.communicate(b"\n")


def test_no_launcher():
    assert launched_hosts() == {}
    assert launched_hosts(2**30) == {}


def test_the_same_nodes_pass(spec):
    check_hosts(HOSTS, spec)
    check_hosts({}, spec)
    check_hosts({"a0": 1, "b0": 1}, spec)  # the file may know more nodes than the job has
    check_hosts({"a0.site.org": 1, "b0": 1, "a1": 1, "b1": 1}, spec)
    check_hosts(
        {"10.0.0.1": 1, "10.0.0.2": 1, "10.0.0.3": 1, "gateway": 1}, spec
    )  # addresses: what the nodes report decides


@pytest.mark.parametrize(
    "change, text",
    [
        (
            {"c0": 1},
            "has 5 hosts, .*two_clusters_4.toml 4 nodes: host 'c0' is in no cluster; add it",
        ),
        (
            {"b0": 2},
            "starts 2 processes on 'b0', but in .*two_clusters_4.toml key 'cluster.b.processes' is 1",
        ),
    ],
)
def test_other_nodes_are_named(spec, change, text):
    hosts = {host: count for host, count in {**HOSTS, **change}.items() if count}
    with pytest.raises(HolmesError, match=text):
        check_hosts(hosts, spec)
