"""Healthy NICs of each kind, for tests."""

from holmes_ext.cluster.nic import Gid, Nic

V2 = Gid(3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "roce_v2", "ens1")
IB = Nic(
    "ib",
    "mlx5_0",
    1,
    state="up",
    state_text="ACTIVE",
    rate_bps=200 * 10**9,
    max_rate_bps=252 * 10**9,
    subnet_prefix="fec0:0000:0000:0001",
    driver="mlx5_core",
    mtu=2044,
)
ROCE = Nic(
    "roce",
    "mlx5_1",
    1,
    ("ens1",),
    "up",
    "ACTIVE",
    100 * 10**9,
    126 * 10**9,
    ("10.0.0.1/16",),
    9000,
    gids=(V2,),
    driver="mlx5_core",
)
ETHERNET = Nic(
    "ethernet",
    "eth0",
    netdevs=("eth0",),
    state="up",
    state_text="up",
    rate_bps=25 * 10**9,
    addresses=("192.168.0.1/24",),
    mtu=1500,
)
