import json
import os
import shutil
import socket
import subprocess

import pytest
from damage import nic_of
from sysfs_builder import Sysfs, aws_ena, container, dgx_a100, dual_port, ports_down, roce_lag

from holmes_ext.cli import discover
from holmes_ext.cli.main import main
from holmes_ext.cli.show.table import Screen
from holmes_ext.cluster.sysfs.node import read_nics, select


def holmes(*argv):
    return main(["discover", *map(str, argv)])


@pytest.fixture
def dgx(tmp_path):
    return dgx_a100(tmp_path / "dgx07")


@pytest.fixture
def rows(monkeypatch):
    """{NIC: {title: text}} of the table that was printed last."""
    shown = {}

    def table(self, columns, cells, title, styles):
        shown.clear()
        shown.update({row[0]: dict(zip((column.name for column in columns), row)) for row in cells})
        print(title)

    monkeypatch.setattr(Screen, "table", table)
    return shown


def test_table(dgx, rows, capsys):
    assert holmes("--sysfs", dgx) == 0
    assert "NICs of dgx07" in capsys.readouterr().out
    table = rows
    assert list(table)[:11] == [f"mlx5_{i}:1" for i in (0, 1, 2, 3, 6, 7, 8, 9, 4)] + [
        "enp225s0f0",
        "enp226s0",
    ]
    assert list(table)[-2:] == ["enx0a94ef2c1d05", "docker0"]  # set aside: last
    assert table["mlx5_1:1"] == {
        "NIC": "mlx5_1:1",
        "kind": "ib",
        "state": "up",
        "rate": "200 Gb/s",
        "net device": "ibp18s0",
        "addresses": "172.16.1.11/24",
        "v2 GID": "",
        "subnet prefix": "fe80:0000:0000:0000",
        "LID": "29",
        "NUMA": "3",
        "PCI": "0000:12:00.0",
        "note": "",
    }
    assert table["mlx5_4:1"]["v2 GID"] == "3"
    assert table["enp225s0f0"]["note"] == "net device of mlx5_4:1"
    assert table["mlx5_5:1"]["note"] == "the roce port is DOWN/Disabled"
    assert table["enx0a94ef2c1d05"]["note"] == "management (USB/BMC)"


def test_default_subnet_prefix_is_pointed_out(dgx, tmp_path, capsys):
    holmes("--sysfs", dgx)
    assert (
        "fe80:0000:0000:0000 is the default; two clusters with this prefix cannot be told apart: "
        "say which nodes belong together in cluster.toml"
    ) in capsys.readouterr().out
    holmes("--sysfs", dual_port(tmp_path / "own"))
    assert "cannot be told apart" not in capsys.readouterr().out


def test_json(dgx, capsys):
    assert holmes("--sysfs", dgx, "--json") == 0
    out = json.loads(capsys.readouterr().out)
    assert (out["version"], out["node"]) == (1, "dgx07") and set(out) == {"version", "node", "nics"}
    assert tuple(nic_of(d) for d in out["nics"]) == read_nics(dgx)


def test_json_of_this_machine(capsys):
    assert holmes("--json") in (0, 1)
    out = json.loads(capsys.readouterr().out)
    assert out["node"] == socket.gethostname()
    assert [d["device"] for d in out["nics"]] == [nic.device for nic in read_nics()]


def test_include_and_exclude(dgx, capsys):
    assert (
        holmes(
            "--sysfs",
            dgx,
            "--json",
            "--exclude",
            "mlx5_4",
            "mlx5_5",
            "--exclude",
            "enp227s0",
            "--include",
            "mlx5_*",
            "enp226s0",
            "enp227s0",
        )
        == 0
    )
    nics = [nic_of(d) for d in json.loads(capsys.readouterr().out)["nics"]]
    assert [n.name for n in nics if not n.skipped] == [
        n.name for n in select(read_nics(dgx), ["mlx5_*", "enp226s0"], ["mlx5_4", "mlx5_5"])
    ]
    why = {n.name: n.skipped for n in nics if n.skipped}
    assert why["mlx5_4:1"] == why["enp227s0"] == "excluded (--exclude)"
    assert (
        why["enp225s0f0"] == "not in --include"
        and why["docker0"] == "container network (by its name)"
    )


def test_included_management_nic_is_used(dgx, rows):
    assert holmes("--sysfs", dgx, "--include", "enx0a94ef2c1d05") == 0
    assert rows["enx0a94ef2c1d05"]["note"] == ""


def test_no_usable_nic_is_a_problem(tmp_path, rows, capsys):
    assert holmes("--sysfs", ports_down(tmp_path / "n")) == 1
    assert "note: no usable NIC" in capsys.readouterr().out
    assert rows["mlx5_1:1"]["note"] == "the port is in state INIT: no subnet manager has set it up"
    assert holmes("--sysfs", tmp_path / "n", "--json") == 1
    assert holmes("--sysfs", dgx_a100(tmp_path / "d"), "--exclude", "*") == 1


def test_ethernet_without_address_is_not_usable(tmp_path, rows, capsys):
    root = aws_ena(tmp_path / "n")
    (root / "ip_addr.json").write_text("[]")
    without_efa = ("--sysfs", root, "--exclude", "rdmap*")
    assert holmes(*without_efa) == 1
    assert rows["ens5"]["note"] == "the interface is up and has no IP address"
    (root / "ip_addr.json").unlink()  # unknown is not none
    assert holmes(*without_efa) == 0
    assert "IP addresses are unknown" in capsys.readouterr().out


def test_slow_pci_slot_is_pointed_out(tmp_path, rows):
    root = roce_lag(tmp_path / "n")
    (root / "class/net/ens1f0np0/device/current_link_width").write_text("4\n")
    holmes("--sysfs", root)
    assert "PCIe carries 63.02 Gb/s, the link 200 Gb/s" in rows["mlx5_bond_0:1"]["note"]


def test_columns_without_any_value_are_left_out(tmp_path, capsys):
    assert holmes("--sysfs", container(tmp_path / "n")) == 0
    head = capsys.readouterr().out.splitlines()[1]
    assert head.split() == ["NIC", "kind", "state", "rate", "net", "device", "addresses"]


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_the_table_fits_the_screen_and_says_what_it_lacks(dgx, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert holmes("--sysfs", dgx) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[
        : next(i for i, line in enumerate(lines) if line.startswith(("too narrow", "note:")))
    ]
    assert max(len(line.rstrip()) for line in table) <= columns
    assert all(word in table[1] for word in ("NIC", "kind", "state", "rate", "note"))
    assert any(line.startswith("mlx5_0:1  ") and "200 Gb/s" in line for line in table)
    assert (
        ("PCI" in table[1])
        == (columns == 200)
        != any(line.startswith("too narrow for: ") for line in lines)
    )


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--sysfs", "DIR/nothing"], "DIR/nothing: No such file or directory"),
        (["--sysfs", "DIR"], "is not the root of a /sys tree"),
        (["--sysfs", "DIR/dgx07", "--include", "eth99"], "include pattern 'eth99' matches no NIC"),
        (["--sysfs", "DIR/dgx07", "--exclude", "eth99"], "exclude pattern 'eth99' matches no NIC"),
        (["--sysfs", "DIR/broken"], "DIR/broken/class/net/eth0: leads nowhere"),
    ],
)
def test_bad_input_is_one_line(dgx, tmp_path, capsys, argv, message):
    (tmp_path / "broken/class/net").mkdir(parents=True)
    (tmp_path / "broken/class/net/eth0").symlink_to("../../devices/gone")
    assert holmes(*(a.replace("DIR", str(tmp_path)) for a in argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert (
        captured.err.startswith("holmes: ")
        and message.replace("DIR", str(tmp_path)) in captured.err
    )


def test_help_says_how_to_capture(capsys):
    with pytest.raises(SystemExit):
        holmes("--help")
    assert discover.CAPTURE in capsys.readouterr().out


def capture(root, work):
    """Run the help's one-liner against `root` and unpack what it made; returns the folder for --sysfs."""
    for tool in ("tar", "ip", "realpath", "hostname"):
        if not shutil.which(tool):
            pytest.skip(f"needs {tool}")
    command = discover.CAPTURE.replace("/tmp", str(work)).replace("cd /sys", f"cd {root}")
    subprocess.run(["bash", "-c", command], check=True, timeout=60)
    name = socket.gethostname()
    (work / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", work / f"{name}.tar.gz", "-C", work / "unpacked"], check=True)
    assert os.listdir(work / "unpacked") == [name]
    return work / "unpacked" / name


@pytest.mark.parametrize("case", [dgx_a100, roce_lag, dual_port, container])
def test_captured_tree_reads_the_same(tmp_path, case):
    root = case(tmp_path / "n")
    assert read_nics(capture(root, tmp_path), addresses={}) == read_nics(root, addresses={})


def test_captured_tree_of_this_machine_reads_the_same(tmp_path):
    copy = capture("/sys", tmp_path)
    assert read_nics(copy) == read_nics()
    assert (
        sum(
            os.path.getsize(os.path.join(d, f))
            for d, _, files in os.walk(copy)
            for f in files
            if not os.path.islink(os.path.join(d, f))
        )
        < 50e6
    )


def test_a_network_device_that_a_plugin_uses_is_named(tmp_path, rows):
    tree = Sysfs(tmp_path)
    tree.net("hsn0", tree.pci("0000:01:00.0", "cxi_ss1"), addresses=["10.150.0.7/16"])
    holmes("--sysfs", tree.save_addresses())
    assert rows["hsn0"]["note"] == "Slingshot (HPE): fast with a plugin of NCCL only"


def test_nics_of_a_plugin_are_named(tmp_path, rows):
    holmes("--sysfs", aws_ena(tmp_path / "n"))
    assert rows["rdmap0s6:1"]["kind"] == "efa"
    assert rows["rdmap0s6:1"]["note"] == "EFA (AWS): NCCL needs a plugin"
