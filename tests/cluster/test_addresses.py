import ipaddress
import json
import os
import shutil
import socket
import subprocess

import pytest
from namespaces import VETH, in_namespace

from holmes_ext.cluster import addresses
from holmes_ext.cluster.addresses import captured_addresses, egress_interface, interface_addresses
from holmes_ext.errors import HolmesError


def test_every_device_is_listed():
    found = interface_addresses()
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1/8" in found["lo"]
    for listed in found.values():
        for address in listed:
            assert str(ipaddress.ip_interface(address)) == address and "/" in address


@pytest.mark.skipif(not shutil.which("ip"), reason="needs ip (iproute2)")
def test_agrees_with_ip_addr(tmp_path):
    (tmp_path / "ip_addr.json").write_text(
        subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True).stdout
    )
    captured, live = captured_addresses(tmp_path), interface_addresses()
    assert {k: set(v) for k, v in captured.items()} == {k: set(v) for k, v in live.items()}


def test_in_a_namespace_with_link_local():
    out = in_namespace(
        "import json; from holmes_ext.cluster.addresses import *; print(json.dumps(interface_addresses()))",
        *VETH,
        "until ip -6 addr show dev vb | grep -q fe80; do sleep 0.05; done",
    )
    found = json.loads(out)
    assert set(found) == {"lo", "va", "vb"}
    assert set(found["va"]) == {"10.1.2.3/20", "fd01::3/64"}  # its link-local one is left out
    assert [a[:5] for a in found["vb"]] == ["fe80:"]  # the only one it has


EGRESS = "from holmes_ext.cluster.addresses import egress_interface as e; print(*map(e, {hosts!r}))"


def test_egress_follows_the_routes():
    hosts = [
        "10.1.2.3",
        "10.1.15.9",
        "fd01::77",
        "10.9.0.1",
        "10.8.0.5",
        "localhost",
        "127.0.1.1",
        "198.51.100.7",
    ]
    out = in_namespace(
        EGRESS.format(hosts=hosts),
        *VETH,
        "ip link add vc type veth peer name vd",
        "ip link set vc up",
        "ip link set vd up",
        "ip addr add 10.9.0.3/24 dev vc",
        "ip route add 10.8.0.0/16 via 10.1.0.1",
        "ip route add default via 10.9.0.1",
    )
    assert out.split() == ["va", "va", "va", "vc", "va", "vc", "vc", "vc"]


def test_egress_never_loopback_without_default_route():
    out = in_namespace(EGRESS.format(hosts=["localhost", "127.0.0.1"]), *VETH)
    assert out.split() == ["va", "va"]


def test_egress_with_nothing_but_loopback():
    assert in_namespace(EGRESS.format(hosts=["localhost"])) == "lo"


def test_egress_without_route_says_so():
    script = (
        "from holmes_ext.cluster.addresses import *\n"
        "try: egress_interface('192.0.2.77')\nexcept HolmesError as error: print(error)"
    )
    assert "no route to 192.0.2.77" in in_namespace(script, *VETH)


@pytest.mark.parametrize("host", ["no such host", "x" * 300, "a..b"])
def test_egress_to_an_unknown_host(host):
    with pytest.raises(HolmesError, match="is unknown to this node"):
        egress_interface(host)


def test_address_on_loopback_only(monkeypatch):
    """A host whose own address lies on lo (routing on the host) still gets a real device."""
    monkeypatch.setattr(
        addresses,
        "_all_addresses",
        lambda: {"lo": ("127.0.0.1/8", "10.0.0.1/32"), "x": (), "eth1": ("10.0.1.1/31",)},
    )
    monkeypatch.setattr(
        addresses,
        "_local_address",
        lambda family, target: addresses._LocalAddress("10.0.0.1", interface_index=0),
    )
    assert egress_interface("10.0.0.9") == "eth1"


def info(local, prefix=24):
    return {"family": "inet6" if ":" in local else "inet", "local": local, "prefixlen": prefix}


def test_captured(tmp_path):
    assert captured_addresses(tmp_path) is None
    (tmp_path / "ip_addr.json").write_text(
        json.dumps(
            [
                {"ifname": "lo", "addr_info": [info("127.0.0.1", 8)]},
                {},
                {"ifname": "eth0", "addr_info": []},
                {
                    "ifname": "eth1",
                    "addr_info": [info("10.0.0.1"), {}, info("fd00::1", 64), info("fe80::1", 64)],
                },
                {"ifname": "eth2", "addr_info": [info("fe80::2", 64)]},
            ]
        )
    )
    assert captured_addresses(tmp_path) == {
        "lo": ("127.0.0.1/8",),
        "eth0": (),
        "eth1": ("10.0.0.1/24", "fd00::1/64"),
        "eth2": ("fe80::2/64",),
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "3",
        "[3]",
        "[[]]",
        '["ifname"]',
        '[{"ifname": "a"}]',
        '[{"ifname": [], "addr_info": []}]',
        '[{"ifname": "a", "addr_info": 3}]',
        '[{"ifname": "a", "addr_info": [3]}]',
        '[{"ifname": "a", "addr_info": [{"family": "inet"}]}]',
        "[" * 100000,
        "\udcff",
        "\0" * 4096,
        json.dumps([{"ifname": "a", "addr_info": [info("10.0.0.1", 33)]}]),
        json.dumps([{"ifname": "a", "addr_info": [info("10.0.0.1", 8.5)]}]),
        json.dumps([{"ifname": "a", "addr_info": [info("10.0.0.999")]}]),
    ],
)
def test_captured_damaged(tmp_path, text):
    (tmp_path / "ip_addr.json").write_text(text, errors="surrogateescape")
    with pytest.raises(HolmesError, match="ip_addr.json"):
        captured_addresses(tmp_path)


def test_captured_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "ip_addr.json")  # opening it would wait for ever
    with pytest.raises(HolmesError, match="ip_addr.json: is not a regular file"):
        captured_addresses(tmp_path)
