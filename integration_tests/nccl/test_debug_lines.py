"""Tests the reader of NCCL's output, with lines made by the formats in NCCL's source.

A comment beside each format names its file and line.
"""

import pytest

from integration_tests.nccl.debug_lines import read

HOST = "gpu-01:4242"
IB_DEVICES = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"  # 2.27 net_ib.cc:762
SOCKETS = "NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>"  # 2.27 net_socket.cc:67
WHERE = "cudaDev 0 nvmlDev 0 busId 1b000"
START = f"comm 0x55d0 rank 1 nranks 4 {WHERE} commId 0x1a2b - Init START"
STARTS = {
    "2.18": START,  # init.cc:1356
    "2.21": f"ncclCommInitRank {START}",  # init.cc:1544
    "2.27": f"ncclCommInitRankConfig {START}",  # init.cc:1441
    "2.30": f"[Rank 1] ncclCommInitRankConfig {START}",  # init.cc:1912
}


def lines(*texts, thread=4242):
    return "".join(f"{HOST}:{thread} [0] NCCL INFO {text}\n" for text in texts)


@pytest.mark.parametrize("version", STARTS)
def test_the_network_and_devices_of_a_communicator(version):
    send = (
        "Channel 00/0 : 1[0] -> 2[0] [send] via NET/IB/1/GDRDMA/Shared"  # 2.27 transport/net.cc:218
    )
    receive = (
        "Channel 01/0 : 0[0] -> 1[0] [receive] via NET/IB/0/GDRDMA"  # 2.27 transport/net.cc:264
    )
    said = read(
        lines(IB_DEVICES, "Using network IB", STARTS[version]) + lines(send, receive, thread=4250)
    )
    (made,) = said.communicators
    assert (made.network, made.rank, made.ranks, made.split, made.gdr) == ("IB", 1, 4, False, True)
    assert made.devices == {"mlx5_0:1/IB", "mlx5_1:1/RoCE"} and said.devices["IB"] == [
        "mlx5_0:1/IB",
        "mlx5_1:1/RoCE",
    ]


def test_a_split_and_sockets_through_another_ranks_proxy():
    begun = (
        f"ncclCommSplit comm 0x55d0 rank 0 nranks 2 {WHERE} parent 0x44 splitCount 1 color 7 key 0- Init "
        f"START"
    )
    channel = "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/1(3)"  # 2.27 transport/net.cc:222
    (made,) = read(lines(SOCKETS, "Using network Socket", begun, channel)).communicators
    assert (made.network, made.split, made.ranks, made.devices, made.gdr) == (
        "Socket",
        True,
        2,
        {"eth1"},
        False,
    )


def test_communicators_that_two_threads_make_at_once():
    def start(thread):
        ranks = thread
        text = f"comm 0x{thread} rank 0 nranks {ranks} {WHERE} commId 0x1 - Init START"
        return lines(f"ncclCommInitRankConfig {text}", thread=thread)

    networks = lines("Using network IB", thread=1) + lines("Using network Socket", thread=2)
    said = read(networks + start(thread=2) + start(thread=1))
    assert [(made.ranks, made.network) for made in said.communicators] == [(2, "Socket"), (1, "IB")]


def test_warnings_plugins_and_other_lines():
    warning = f"{HOST}:4242 [0] plugin/net.cc:349 NCCL WARN Failed to initialize any NET plugin\n"
    text = (
        "epoch 1\n"
        + warning
        + lines("Using network AWS Libfabric", STARTS["2.27"])
        + '{"rank": 0}\n'
    )
    said = read(text)
    assert said.warnings == ["Failed to initialize any NET plugin"]
    assert [made.network for made in said.communicators] == ["AWS Libfabric"]


def test_a_timestamp_before_the_line_does_not_matter():
    """NCCL 2.26 and newer write timestamps if NCCL_DEBUG_TIMESTAMP_LEVELS is set."""
    written = lines("Using network IB", STARTS["2.27"]).splitlines()
    stamped = "".join(f"[2025-06-01 10:00:00] {line}\n" for line in written)
    assert len(read(stamped).communicators) == 1
