"""Hostfiles as launchers and schedulers write them: right, or refused in one line."""

from pathlib import Path

import pytest

from holmes_ext.cluster.sources.found import clusters_of
from holmes_ext.cluster.sources.hostfile import read_hostfile, read_slots
from holmes_ext.errors import HolmesError

INPUTS = Path(__file__).parents[2] / "inputs" / "hostfiles"


def slots(tmp_path, text):
    """Return host -> processes for the text of a hostfile."""
    file = tmp_path / "hosts"
    file.write_text(text)
    return read_slots(str(file))


@pytest.mark.parametrize(
    "file, expected",
    [
        ("hosts_sge", {"node01.cluster": 8, "node02.cluster": 8}),
        ("hosts_rank", {"node01": 2, "node02": 2}),
        ("hosts_spaces", {"node01": 8, "node02": 8}),
    ],
)
def test_reported_hostfiles(file, expected):
    nodes = read_hostfile(str(INPUTS / file))
    assert {node.name: node.processes for node in nodes} == expected
    assert len(clusters_of(nodes)) == 1


def test_ip_addresses_are_refused_because_nodes_report_their_names():
    with pytest.raises(
        HolmesError, match="10.21.0.11 is an IP address, .*`hostname` prints"
    ) as info:
        read_hostfile(str(INPUTS / "hosts_ip"))
    assert "\n" not in str(info.value)
    assert read_slots(str(INPUTS / "hosts_ip"))["10.22.0.12"] == 8  # for a launcher's own use


@pytest.mark.parametrize(
    "text, expected",
    [
        # Open MPI and deepspeed
        ("a1 slots=8\na2 slots=4 max_slots=8\n", {"a1": 8, "a2": 4}),
        ("a1 slots= 8\na2 slots =4\n", {"a1": 8, "a2": 4}),
        ("root@a1 slots=8\n", {"a1": 8}),
        ("a1 cpu=2\n", {"a1": 2}),
        ("worker-0.job.ns.svc slots=8\n", {"worker-0.job.ns.svc": 8}),
        # MPICH, Intel MPI, horovod
        ("a1:8\na2:4\n", {"a1": 8, "a2": 4}),
        ("a1:8 ifname=ib0\n", {"a1": 8}),
        ("a1:8,a2:4\n", {"a1": 8, "a2": 4}),
        # ranges, as Slurm and pdsh write them
        ("gpu[001-002,020] slots=8\n", {"gpu001": 8, "gpu002": 8, "gpu020": 8}),
        ("gpu00[1-2]:4\n", {"gpu001": 4, "gpu002": 4}),
        # PBS and LSF: a line for each slot
        ("a1\na1\na2\na2\n", {"a1": 2, "a2": 2}),
        ("a1 8 a2 4\n", {"a1": 8, "a2": 4}),
        ("a1/0*8+a2/0*4\n", {"a1": 8, "a2": 4}),
        ("a1/0+a1/1+a2/0-3\n", {"a1": 2, "a2": 4}),
        # SGE
        ("a1 8 all.q@a1 UNDEFINED\na2 8 all.q@a2 <NULL>\n", {"a1": 8, "a2": 8}),
        ("a1 4 long.q@a1 UNDEFINED\na1 4 short.q@a1 UNDEFINED\n", {"a1": 8}),
        ("a1 8\n", {"a1": 8}),
        # Open MPI's rankfile
        ("rank 0=a1 slot=0:0-3\nrank 1=a1 slot=1:0-3\nrank 2=a2 slot=0\n", {"a1": 2, "a2": 1}),
        ("rank 0 = a1 slot = 0\n", {"a1": 1}),
        # editors
        ("\ufeffa1 slots=8\r\na2 slots=8\r\n", {"a1": 8, "a2": 8}),
        ("# comment\na1 slots=8 # here\n\n", {"a1": 8}),
    ],
)
def test_notations(tmp_path, text, expected):
    assert slots(tmp_path, text) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("rank 0=+n0 slot=0", "names no host"),
        ("a1 slot=8", "'slot=8' is not known in a hostfile"),
        ("gpu01 ansible_host=10.0.0.1", "'ansible_host=10.0.0.1' is not known"),
        ("10.0.0.1 gpu01 gpu01.site", "'gpu01' is not known"),
        ("a1 max_slots=8", "max_slots without slots leaves the number open"),
        ("a1:", "has no number after the colon"),
        ("a1:ppn=8", "'ppn=8' slots"),
        ("a1 slots=8\na1 slots=8", "line 2: host 'a1' is named twice"),
        ("a1 slots=8\na1", "line 2: host 'a1' is named with and without"),
        ("{", "not a host|not a list"),
        ("[gpu]", "not numbers"),
        ("a1 slots=", "has no number"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(tmp_path, text, message):
    with pytest.raises(HolmesError, match=message) as info:
        slots(tmp_path, text)
    assert "line" in str(info.value) and "\n" not in str(info.value)


def test_localhost_is_no_name_of_a_node(tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=8\n")
    with pytest.raises(HolmesError, match="every node calls itself localhost"):
        read_hostfile(str(tmp_path / "hosts"))


def test_names_of_an_hpe_cray_are_one_cluster(tmp_path):
    names = [
        f"x{cabinet}c{chassis}s0b{board}n0"
        for cabinet in (1000, 1001)
        for chassis in (0, 7)
        for board in (0, 1)
    ]
    (tmp_path / "hosts").write_text("".join(f"{name} slots=4\n" for name in names))
    (cluster,) = clusters_of(read_hostfile(str(tmp_path / "hosts")))
    assert cluster.nodes == tuple(names) and cluster.processes == 4
