"""The network between clusters (lab/network/inter_cluster.py and delay_line.py).

The tests check what a file's network becomes, and which frame passes when.
"""

import struct

import clusters
import pytest
from holmes_lab.network import delay_line, inter_cluster, shaping
from holmes_lab.network.delay_line import LEAST_BUFFER_S, Router

from holmes_ext.cluster.wan import Between, Uplink, Wan

A0, A1, B0, C0 = "10.77.0.1", "10.77.0.2", "10.77.1.1", "10.77.2.1"
MACS = {
    A0: (0, "02:00:00:00:00:0a"),
    A1: (0, "02:00:00:00:01:0a"),
    B0: (1, "02:00:00:00:00:0b"),
    C0: (2, "02:00:00:00:00:0c"),
}


def router(links, uplinks=(0, 0, 0)):
    names = [
        {"mac": f"02:00:00:00:ff:{number:02x}", "uplink_bps": rate}
        for number, rate in enumerate(uplinks)
    ]
    return Router(names, links, MACS)


def frame(target, size=1000, gso=0, kind=b"\x08\x00", source="0.0.0.0"):
    """Return a frame of `size` bytes to `target`, virtio-net header first.

    gso: TCP data for each segment.
    """
    header = struct.pack("<BBHHHH", 1, 1 if gso else 0, 0, gso, 34, 16)
    ip = bytes(12) + bytes(int(part) for address in (source, target) for part in address.split("."))
    tcp = bytes(12) + b"\x80" + bytes(19)  # data offset 8: 32 bytes
    return header + bytes(12) + kind + ip + tcp + bytes(size - 14 - 20 - 32)


def arrivals(net, until=100.0):
    """(seconds, cluster) of everything on the way."""
    found = []
    while net.next_due is not None and net.next_due < until:
        now = net.next_due
        found += [(round(now, 6), target) for target, _ in net.pop_arrived(now)]
    return found


def test_a_frame_arrives_after_its_time_on_the_link_and_the_latency():
    net = router([[0, 1, 8000, 0.5], [0, 2, 0, 0.1], [1, 2, 0, 0.0]])
    net.take(frame(B0), 0, 1.0)
    net.take(frame(C0), 0, 1.0)
    assert arrivals(net) == [(1.1, 2), (2.5, 1)]  # 1000 bytes at 8 kb/s: 1 s


def test_all_nodes_share_a_link_and_both_directions_are_its_own():
    net = router([[0, 1, 8_000_000, 0.0]], (0, 0, 0))
    net.take(frame(B0), 0, 1.0)
    net.take(frame(B0), 0, 1.0)
    net.take(frame(A0), 1, 1.0)
    assert arrivals(net) == [(1.001, 1), (1.001, 0), (1.002, 1)]


def test_an_uplink_is_shared_by_the_ways_to_all_clusters_each_way():
    links = [[0, 1, 0, 0.0], [0, 2, 0, 0.0], [1, 2, 0, 0.0]]
    out = router(links, (8_000_000, 0, 0))
    out.take(frame(B0), 0, 1.0)
    out.take(frame(C0), 0, 1.0)
    assert arrivals(out) == [(1.001, 1), (1.002, 2)]
    into = router(links, (8_000_000, 0, 0))
    into.take(frame(A0), 1, 1.0)
    into.take(frame(A1), 2, 1.0)
    assert arrivals(into) == [(1.001, 0), (1.002, 0)]


def test_pairs_of_nodes_share_a_link_fairly_and_each_ones_frames_keep_their_order():
    """Of A0 five frames wait when A1 sends two of half the size."""
    net = router([[0, 1, 8_000_000, 0.0]], (0, 0, 0))
    for size, source in (
        (1000, A0),
        (1001, A0),
        (1002, A0),
        (1003, A0),
        (1004, A0),
        (500, A1),
        (501, A1),
    ):
        net.take(frame(B0, size, source=source), 0, 1.0)
    sizes = []
    while net.next_due is not None:
        sizes += [12 + len(pieces[1]) for _, pieces in net.pop_arrived(net.next_due)]
    assert sizes == [500, 1000, 501, 1001, 1002, 1003, 1004]


def test_what_comes_from_near_does_not_wait_for_what_is_still_far():
    net = router([[0, 1, 0, 1.0], [0, 2, 0, 0.1], [1, 2, 0, 0.0]], (8_000_000, 0, 0))
    net.take(frame(A0), 1, 1.0)
    net.take(frame(A0), 2, 1.0)
    assert arrivals(net) == [(1.101, 0), (2.001, 0)]


def test_a_large_frame_does_not_wait_at_every_hop_until_it_is_whole():
    net = router([[0, 1, 8_000_000, 0.0]], (8_000_000, 0, 0))
    net.take(frame(B0), 0, 1.0)
    assert arrivals(net) == [(1.001, 1)]


def test_more_than_the_buffer_is_dropped_and_the_rest_keeps_its_order():
    net = router([[0, 1, 8_000_000, 0.0]], (0, 0, 0))
    room = round(LEAST_BUFFER_S * 1000) + 1
    for _ in range(room + 100):
        net.take(frame(B0), 0, 1.0)
    assert len(arrivals(net)) == room and net.dropped == 100


@pytest.mark.parametrize(
    "text", [frame(A1), frame("10.77.9.9"), frame(B0, kind=b"\x08\x06"), b"short"]
)
def test_what_no_node_elsewhere_gets_goes_nowhere(text):
    net = router([[0, 1, 0, 0.0], [0, 2, 0, 0.0], [1, 2, 0, 0.0]])
    net.take(text, 0, 1.0)
    assert net.next_due is None


def test_the_router_puts_the_receivers_mac_and_its_own_before_the_rest():
    net = router([[0, 1, 0, 0.0]], (0, 0, 0))
    sent = frame(B0)
    net.take(sent, 0, 1.0)
    ((target, pieces),) = net.pop_arrived(1.0)
    whole = b"".join(bytes(piece) for piece in pieces)
    assert target == 1 and whole[:10] == sent[:10] and whole[22:] == sent[22:]
    assert whole[10:22] == bytes.fromhex("02000000000b" + "02000000ff01")


def test_segments_that_are_cut_later_count_with_their_headers():
    assert delay_line.wire_bits(frame(B0, 1000)) == 8000
    assert delay_line.wire_bits(frame(B0, 66 + 3 * 1448, gso=1448)) == 8 * 3 * 1514
    assert delay_line.wire_bits(frame(B0, 66 + 2 * 1448 + 1, gso=1448)) == 8 * (2 * 1514 + 67)


SPEC = clusters.spec("a ib 2Gb/s a0,a1", "b roce 600Mb/s b0", "c ethernet - c0")


def test_a_file_that_says_nothing_of_it_has_one_ethernet():
    nodes = shaping.lay_out(SPEC, 1.0)
    assert {node.nics[0].bridge for node in nodes} == {"eth"} and {
        node.ethernet_segment for node in nodes
    } == {None}


def test_each_cluster_has_a_network_and_a_router_of_its_own():
    from dataclasses import replace

    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    wan = Wan((Uplink("a", 10**9),), tuple(Between(pair, 10**8, 0.02) for pair in pairs))
    spec = replace(SPEC, wan=wan)
    nodes = shaping.lay_out(spec, 0.5)
    assert [(node.address, node.nics[0].bridge, node.nics[0].prefix) for node in nodes] == [
        ("10.77.0.1", "eth0", 24),
        ("10.77.0.2", "eth0", 24),
        ("10.77.1.1", "eth1", 24),
        ("10.77.2.1", "eth2", 24),
    ]
    ip, _ = shaping.node_batches(nodes[2])
    assert "route add 10.77.0.0/16 via 10.77.1.254 dev eth0\n" in ip and "nud permanent" in ip
    told = inter_cluster.delay_line(
        spec,
        0.5,
        [
            inter_cluster.NodeAddress(node.address, node.ethernet_segment, node.nics[0].mac)
            for node in nodes
        ],
        wire_bits_per_data_bit=2.0,
    )
    # scale 0.5, twice as much on the wire
    assert [each["uplink_bps"] for each in told["clusters"]] == [10**9, 0, 0]
    assert told["links"] == [[0, 1, 1e8, 0.02], [0, 2, 1e8, 0.02], [1, 2, 1e8, 0.02]]
    Router(**told)


@pytest.mark.parametrize(
    "latency, quantum", [(0.0, 400e-6), (2e-3, 400e-6), (6e-3, 600e-6), (80e-3, 1e-3)]
)
def test_it_sleeps_a_tenth_of_the_least_latency_within_limits(latency, quantum):
    assert router([[0, 1, 0, latency], [0, 2, 0, 1.0], [1, 2, 0, 1.0]]).quantum_s == pytest.approx(
        quantum
    )
