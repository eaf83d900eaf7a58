"""Tests the lab's nodes and links: what a program on a node sees, and how fast a link is."""

import json
from pathlib import Path

from integration_tests.lab.processes import PATIENCE, cli, python


def test_each_node_is_a_machine_of_its_own(lab):
    code = """
import json, os, socket
name = socket.gethostname()
everyone = [socket.gethostbyname(name) for name in ("a0", "a1", "b0")]
print(json.dumps([name, socket.gethostbyname(name), sorted(os.listdir("/sys/class/net")), everyone,
                  os.listdir("/dev/shm"), os.path.exists(f"/proc/{os.getpid()}")]))
"""
    result = lab.run(python(code))
    assert result.returncode == 0, result.outputs
    reports = [json.loads(result.stdout[rank]) for rank in range(3)]
    everyone = ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert reports[0] == ["a0", "10.77.0.1", ["eth0", "ib0", "lo"], everyone, [], True]
    assert reports[2] == ["b0", "10.77.0.3", ["eth0", "lo", "roce0"], everyone, [], True]


def test_torchruns_environment(lab):
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "GROUP_RANK",
        "NODE_RANK",
        "MASTER_ADDR",
        "OMP_NUM_THREADS",
    ]
    code = (
        f"import os, json; print(json.dumps([os.environ[n] for n in {names}] + "
        f"[os.environ['HOLMES_LAB_NODE']]))"
    )
    result = lab.run(python(code), order=["b0", "a1"], processes=2)
    reports = [json.loads(result.stdout[rank]) for rank in range(4)]
    assert reports[0] == ["0", "0", "4", "2", "2", "0", "0", "10.77.0.3", "1", "b0"]
    assert reports[3] == ["3", "1", "4", "2", "2", "1", "1", "10.77.0.3", "1", "a1"]
    assert not result.emulated and result.first_failed is None


def test_the_sysfs_tree_is_named_and_readable(lab):
    code = (
        "import os; print(open(os.environ['HOLMES_SYSFS'] + "
        "'/class/infiniband/mlx5_0/ports/1/link_layer').read())"
    )
    result = lab.run(python(code))
    assert [result.stdout[rank].strip() for rank in range(3)] == [
        "InfiniBand",
        "InfiniBand",
        "Ethernet",
    ]


TRANSFER = """
import os, socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
if os.environ["RANK"] == "0":
    for _ in range(400):
        try:
            s = socket.create_connection((address, 7000), timeout=30)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    start = time.monotonic()
    s.sendall(bytes(size)); s.recv(1)
    print(time.monotonic() - start)
else:
    c, _ = socket.create_server((address, 7000)).accept()
    while size > 0:
        size -= len(c.recv(1 << 16))
    c.sendall(b"x")
"""


def address(lab, node, nic):
    return next(other for other in lab.nodes if other.name == node).nic(nic).address


def transfer(lab, sender, receiver, nic, size):
    """Send `size` bytes between two nodes over one NIC of each.

    Returns:
        The seconds, the bytes that the sender's NIC sent, and the bytes that the receiver's NIC received.
    """
    before = lab.counters()
    command = python(TRANSFER, address(lab, receiver, nic), str(size))
    result = lab.run(command, order=[sender, receiver], timeout=PATIENCE)
    assert result.returncode == 0, result.outputs
    after = lab.counters()
    # The counters of a NIC are (bytes received, bytes sent).
    sent = after[sender][nic][1] - before[sender][nic][1]
    received = after[receiver][nic][0] - before[receiver][nic][0]
    return float(result.stdout[0]), sent, received


def test_fabrics_are_apart_and_ethernet_reaches_all(lab):
    size = 1_000_000
    for sender, receiver, nic in (("a0", "a1", "ib0"), ("a0", "b0", "eth0")):
        before = lab.counters()
        _, sent, received = transfer(lab, sender, receiver, nic, size)
        assert size < sent < 1.2 * size and size < received < 1.2 * size
        other_nic = "eth0" if nic == "ib0" else "ib0"
        assert lab.counters()[sender][other_nic] == before[sender][other_nic]
    code = (
        "import socket, sys; s = socket.socket(); s.settimeout(2); sys.exit(s.connect_ex((sys.argv[1], "
        "7000)) == 0)"
    )
    result = lab.run(python(code, address(lab, "b0", "roce0")), order=["a0"])
    assert result.returncode == 0


def test_links_are_shaped_and_rates_can_be_changed(lab):
    """A transfer takes at least as long as the configured rate implies.

    A busy machine makes a transfer slower, so no upper bound is asserted.
    """
    size = 2_000_000
    seconds, _, _ = transfer(lab, "a0", "b0", "eth0", size)
    assert seconds > 0.85 * size * 8 / 400e6
    try:
        lab.set_rate("b0", "eth0", 40_000_000)
        seconds, _, _ = transfer(lab, "a0", "b0", "eth0", size)
        assert seconds > 0.85 * size * 8 / 40e6  # shaped where b0 receives
        seconds, _, _ = transfer(lab, "b0", "a0", "eth0", size)
        assert seconds > 0.85 * size * 8 / 40e6  # and where it sends
    finally:
        lab.set_rate("b0", "eth0", 400_000_000)


def test_a_pulled_cable_is_seen_by_the_node(lab):
    code = "import os; print(open('/sys/class/net/ib0/carrier').read().strip(), os.environ['HOLMES_SYSFS'])"
    lab.set_link("a1", "ib0", up=False)
    try:
        result = lab.run(python(code), order=["a1"])
        has_carrier, sysfs = result.stdout[0].split()
        assert has_carrier == "0"
        assert Path(sysfs, "class/infiniband/mlx5_0/ports/1/state").read_text() == "1: DOWN\n"
    finally:
        lab.set_link("a1", "ib0", up=True)
    assert lab.run(python(code), order=["a1"]).stdout[0].startswith("1 ")


def test_measure(toml):
    """A busy machine may make a link slower than configured (status 1), but never faster."""
    process = cli("measure", "--cluster", "FILE", "--scale", "0.1", "--json", toml=toml)
    out, errors = process.communicate(timeout=2 * PATIENCE)
    rows = json.loads(out)["rows"]
    assert {(row["link"], *row["nodes"], row["configured_bps"]) for row in rows} == {
        ("a", "a0", "a1", 200_000_000),
        ("ethernet", "a0", "b0", 40_000_000),
    }
    counted = [row for row in rows if row["counts"]]
    assert all(0 < row["ratio"] <= 1.1 for row in counted), rows
    expected_status = 0 if all(row["within"] for row in counted) else 1
    assert process.returncode == expected_status, errors
