"""A job on the host of the coordinator, and one on another host, in two network namespaces."""

from namespaces import in_namespace

#: The main thread is on the first host. The thread of a job elsewhere moves to a namespace of its own.
SCRIPT = """
import ctypes, subprocess, threading
from dataclasses import replace
import joined_jobs
import torch
from joined_jobs import coordinator, in_threads, joined_of
from holmes_ext.join.address import JoinAddress, PortRange
from holmes_ext.join.settings import parse_outer

CLONE_NEWNET = 0x40000000
place_on_loopback = joined_jobs.place_at

def place_at(job, port, ports):
    place = place_on_loopback(job, port, ports)
    return replace(place, address=JoinAddress(job, coordinator_host[job], port))

joined_jobs.place_at = place_at

def configure(*commands):
    for command in commands:
        subprocess.run(command.split(), check=True)

def train(job, port, ports):
    model = torch.nn.ParameterList([torch.zeros(3000)])
    settings = parse_outer("every=4,fragments=2,delay=1,compress=off,min=2,timeout=20")
    loop = joined_of(model, job, port, settings, ports=ports)
    loop.begin()
    begun.wait(60)
    for _ in range(8):
        with torch.no_grad():
            model[0] += 1
        loop.after_step(10)
    loop.end()

def train_elsewhere(job, port, ports, network):
    assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
    configure(
        f"ip -n main link add va{network} type veth peer name vb netns {threading.get_native_id()}",
        f"ip -n main addr add 10.1.{network}.3/24 dev va{network}",
        f"ip -n main link set va{network} up",
        "ip link set lo up", f"ip addr add 10.1.{network}.4/24 dev vb", "ip link set vb up",
    )
    train(job, port, ports)

cases = (("west", "east", PortRange()), ("east", "west", PortRange(None)))
for network, (beside, elsewhere, ports) in enumerate(cases):
    coordinator_host = {beside: "127.0.0.1", elsewhere: f"10.1.{network}.3"}
    begun = threading.Barrier(2)
    with coordinator(host="") as server:
        in_threads({
            beside: lambda: train(beside, server.port, ports),
            elsewhere: lambda: train_elsewhere(elsewhere, server.port, ports, network),
        }, 50)
        commits = sum("commit (" in line and line.count("0.50") == 2 for line in server.told)
        print(commits, "relayed" if server.relay.counted() else "direct", flush=True)
"""
#: Names the first host's namespace for `ip`.
NAME = (
    "mount -t tmpfs none /run",
    "mkdir /run/netns",
    "touch /run/netns/main",
    "mount --bind /proc/self/ns/net /run/netns/main",
)


def test_a_job_beside_the_coordinator_trains_with_one_elsewhere():
    """Of two jobs, the one whose name sorts first calls.

    1. The job elsewhere calls: the other one advertised 127.0.0.1.
    2. The job beside the coordinator calls over the relay: it sent plain text, which the other refused.
    """
    assert in_namespace(SCRIPT, *NAME).splitlines() == ["4 direct", "4 relayed"]
