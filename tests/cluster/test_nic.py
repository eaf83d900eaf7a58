import json
from dataclasses import asdict, replace

import pytest

from holmes_ext.cluster.nic import Gid, Nic
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError

V2_LOCAL = Gid(1, "fe80:0000:0000:0000:0e42:a1ff:fe65:5c6e", "roce_v2", "bond0")
V1_IPV4 = Gid(2, "0000:0000:0000:0000:0000:ffff:0a0a:0015", "roce_v1", "bond0")
V2_IPV4 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a0a:0015", "roce_v2", "bond0")
V2_VLAN = Gid(0, "0000:0000:0000:0000:0000:ffff:0a14:0015", "roce_v2", "bond0.200")
V2_IPV6 = Gid(5, "fd10:0000:0000:0000:0000:0000:0000:0021", "roce_v2", "bond0")

IB = Nic(
    kind="ib",
    device="mlx5_0",
    port=1,
    netdevs=("ib0",),
    state="up",
    state_text="ACTIVE",
    rate_bps=200 * 10**9,
    max_rate_bps=252 * 10**9,
    addresses=("172.16.0.11/24", "fd00::1/64"),
    mtu=4092,
    subnet_prefix="fe80:0000:0000:0000",
    gids=(Gid(0, "fe80:0000:0000:0000:0c42:a103:0065:5c00", "ib"),),
    lid=28,
    sm_lid=1,
    numa=3,
    pci="0000:0c:00.0",
    driver="mlx5_core",
)
ETH = Nic(
    kind="ethernet",
    device="eth0",
    netdevs=("eth0",),
    state="up",
    members=("a", "b"),
    rdma="mlx5_1:1",
)


def read(values, where="here"):
    return Table(values, where).into(Nic)


def roce(*gids, **more):
    return Nic(
        kind="roce", device="mlx5_bond_0", port=1, netdevs=("bond0", "bond0.200"), gids=gids, **more
    )


@pytest.mark.parametrize(
    "nic", [IB, ETH, roce(V2_LOCAL, V2_IPV4, parent="mlx5_0", skipped="storage (by its name)")]
)
def test_round_trip_through_json(nic):
    assert read(json.loads(json.dumps(asdict(nic)))) == read(asdict(nic)) == nic


def test_defaults():
    assert read({"kind": "ib", "device": "mlx5_0", "port": 1}) == Nic("ib", "mlx5_0", 1)


def test_names():
    assert (IB.name, IB.ifname, IB.up, IB.usable) == ("mlx5_0:1", "ib0", True, True)
    assert (ETH.name, ETH.ifname) == ("eth0", "eth0")
    assert Nic("ib", "mlx5_0", 1).ifname == ""
    aside = replace(IB, skipped="storage")
    assert aside.up and not aside.usable


@pytest.mark.parametrize(
    "gids, index",
    [
        ((), None),
        ((V1_IPV4,), None),
        ((V2_LOCAL,), 1),
        ((V2_LOCAL, V2_IPV6), 5),
        ((V2_LOCAL, V1_IPV4, V2_IPV4, V2_IPV6), 3),
        ((V2_VLAN, V2_IPV4), 3),  # the net device's own address before its VLAN's
        ((V2_VLAN, V2_IPV6), 0),
        (
            (Gid(7, "0000:0000:0000:0000:0000:ffff:a9fe:0001", "roce_v2"), V2_IPV6),
            5,
        ),  # 169.254.0.1 is link-local
    ],
)
def test_roce_v2_index(gids, index):
    assert roce(*gids).roce_v2_index == index


@pytest.mark.parametrize(
    "key, value",
    [
        ("kind", "IB"),
        ("kind", ["ib"]),
        ("device", ""),
        ("device", "a b"),
        ("device", "a/b"),
        ("device", "x" * 65),
        ("device", 3),
        ("device", "caf\u00e9"),
        ("port", 0),
        ("port", -1),
        ("port", 256),
        ("port", True),
        ("port", "1"),
        ("netdevs", "ib0"),
        ("netdevs", [1]),
        ("state", "UP"),
        ("state_text", "a\nb"),
        ("rate_bps", -1),
        ("rate_bps", 1.5),
        ("max_rate_bps", None),
        ("addresses", ["10.0.0.1"]),
        ("addresses", ["10.0.0.1/33"]),
        ("addresses", ["x/8"]),
        ("addresses", {"a": 1}),
        ("mtu", "1500"),
        ("subnet_prefix", "fe80::"),
        ("gids", 3),
        ("gids", [3]),
        ("gids", [{"index": 0, "value": "fe80", "type": "ib"}]),
        ("gids", [{"index": 0, "value": V2_IPV4.value}]),
        ("gids", [{"index": 0, "value": V2_IPV4.value, "type": "RoCE v2"}]),
        ("lid", -1),
        ("lid", 2**32),
        ("numa", -2),
        ("pci", "41:00.0"),
        ("driver", None),
        ("parent", 1),
        ("members", None),
        ("rdma", "x" * 201),
        ("skipped", False),
        ("speed", 1),
    ],
)
def test_bad_values_name_place_and_key(key, value):
    with pytest.raises(HolmesError, match=rf"^node 'a': .*'{key}['\[]") as caught:
        read({**asdict(IB), key: value}, "node 'a'")
    assert len(str(caught.value)) < 400


def test_missing_key():
    with pytest.raises(HolmesError, match="here: key 'device' is missing"):
        read({"kind": "ib"})


def test_port_and_netdevs_belong_to_the_kind():
    with pytest.raises(HolmesError, match="'port' must be 0 for ethernet"):
        Nic("ethernet", "eth0", 1, ("eth0",))
    with pytest.raises(HolmesError, match="'netdevs' of an ethernet NIC"):
        Nic("ethernet", "eth0", 0, ("eth1",))


@pytest.mark.parametrize("where_key", ["index", "value", "type"])
def test_gid_missing_key(where_key):
    gid = asdict(V2_IPV4)
    del gid[where_key]
    with pytest.raises(HolmesError, match=rf"here: key 'gids\[0\].{where_key}' is missing"):
        read({**asdict(IB), "gids": [gid]})
