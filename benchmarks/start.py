"""How the start of a job scales: reports of thousands of ranks through one store, until each has the verdict.

    python benchmarks/start.py --json FILE

Every rank calls runtime/start/exchange.py with a report as a real one: 8 ranks to a node, 9 NICs to a node,
half of the nodes InfiniBand and half RoCE; rank 0 makes the real plan (pipeline 4, tensor 8). The store is
torch's TCPStore in rank 0's process; the other ranks are threads of 64 processes on the same machine, in a
network namespace of their own, all connected to the store before the time begins, though one rank of a node
speaks for it (neighbours.py) and the other seven have the verdict from that one. "verdict": seconds from the
last rank's report until the last rank has it, with all ranks sharing the cores: what every node would do for
itself, these do one after the other. Reading it (Site and Plan from JSON) is each rank's own work on its own
cores in a real job, so it is timed apart, for one rank. "bytes" cross the loopback of the namespace: what
rank 0 would send and receive.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

CASES = {"1024 ranks": 1024, "4096 ranks": 4096, "16384 ranks": 16384}
#: Seconds to the verdict that the project set itself.
TARGETS = {4096: "<= 3", 16384: "<= 20"}
PER_NODE, CLIENTS, TIMEOUT_S = 8, 64, 300.0


def report(rank: int, world: int) -> dict:
    """What a rank with its node's NICs says (runtime/start/rank.py)."""
    from holmes_ext.cluster.nic import Nic
    from holmes_ext.cluster.node_report import NodeReport

    node, local = divmod(rank, PER_NODE)
    high, low = divmod(node, 256)
    ib, agreed = 2 * node * PER_NODE < world, {f"setting {number}": "value" for number in range(24)}
    document = {
        "node": f"node{node:05d}",
        "identity": f"boot-{node}",
        "local_rank": local,
        "agreed": agreed,
    }
    if local:
        return document
    ethernet = Nic(
        "ethernet",
        "eth0",
        netdevs=("eth0",),
        state="up",
        state_text="up",
        rate_bps=10**11,
        addresses=(f"10.{high}.{low}.1/8",),
        mtu=1500,
    )
    fast = (
        Nic(
            "ib" if ib else "roce",
            f"mlx5_{hca}",
            1,
            (f"net{hca}",),
            "up",
            "ACTIVE",
            2 * 10**11,
            addresses=(f"11.{high}.{low}.{hca + 1}/8",),
            subnet_prefix="fec0:0000:0000:0001" if ib else "",
            pci=f"0000:{hca:02x}:00.0",
            driver="mlx5_core",
        )
        for hca in range(8)
    )
    nics = NodeReport(
        document["node"], document["identity"], f"10.{high}.{low}.1", (ethernet, *fast)
    )
    return {**document, "nics_of_node": nics.to_dict()}


def process(rank: int, world: int, port: int):
    from holmes_ext.runtime.start.launcher import Process

    return Process(rank, world, rank % PER_NODE, PER_NODE, "127.0.0.1", port, "benchmark")


@dataclass(frozen=True)
class Clients:
    """A process whose threads are ranks: what it says, and what it is told."""

    said: TextIO
    told: TextIO

    @classmethod
    def forked(cls, first: int, last: int, world: int, port: int) -> Clients:
        """Of ranks first to last - 1."""
        (out_read, out_write), (in_read, in_write) = os.pipe(), os.pipe()
        if os.fork() == 0:
            clients_main(first, last, world, port, open(in_read), open(out_write, "w"))
        os.close(out_write)
        os.close(in_read)
        return cls(open(out_read), open(in_write, "w"))


def clients_main(
    first: int, last: int, world: int, port: int, commands: TextIO, results: TextIO
) -> None:
    """Connect, wait for a line, exchange, say when the last had the verdict."""
    from holmes_ext.runtime.start.exchange import exchange
    from holmes_ext.runtime.start.store import connect

    threading.stack_size(256 * 1024)
    sys.setswitchinterval(
        1.0
    )  # thousands of threads that wait for the interpreter look for it so often
    ends, ready, go = [], threading.Semaphore(0), threading.Event()

    def rank_main(rank: int) -> None:
        rank_process, rank_report = process(rank, world, port), report(rank, world)
        store = connect(rank_process, TIMEOUT_S)
        ready.release()
        go.wait()
        exchange(store, rank_process, rank_report, lambda *_: {}, TIMEOUT_S)
        ends.append(time.monotonic())

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(first, last)]
    for thread in threads:
        thread.start()
    for _ in threads:
        ready.acquire()
    print("ready", file=results, flush=True)
    commands.readline()
    go.set()
    for thread in threads:
        thread.join()
    print(max(ends), len(ends), file=results, flush=True)
    commands.readline()
    os._exit(0)


def rank0_main(world: int) -> None:
    """Host the store, start the clients, decide; prints one line: seconds, bytes, memory, seconds of
    reading."""
    import torch.distributed  # noqa: F401 - once, for the clients too

    from holmes_ext.cluster.site import Site
    from holmes_ext.options import Options
    from holmes_ext.plan.maker import PlanRequest
    from holmes_ext.plan.plan import parse_plan
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.runtime.start.exchange import exchange
    from holmes_ext.runtime.start.store import connect

    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    port, request = 29500, PlanRequest(Options(), Sizes(pipeline=4, tensor=8))

    def decide(reports, nodes):
        site, plan = request.make_plan(nodes)
        return {"site": site.to_dict(), "plan": plan.to_json(), "source": plan.source, "lines": []}

    bounds = [1, *(world * number // CLIENTS for number in range(1, CLIENTS + 1))]
    clients = [Clients.forked(*part, world, port) for part in zip(bounds, bounds[1:])]
    store = connect(process(0, world, port), TIMEOUT_S, is_host=True)
    for client in clients:
        assert client.said.readline() == "ready\n"
    before, begin = loopback_bytes(), time.monotonic()
    for client in clients:
        print(file=client.told, flush=True)
    verdict = exchange(store, process(0, world, port), report(0, world), decide, TIMEOUT_S)
    lines = [client.said.readline().split() for client in clients]
    assert sum(int(count) for _, count in lines) == world - 1
    took, crossed = max(float(end) for end, _ in lines) - begin, loopback_bytes() - before
    begin = time.monotonic()
    content = verdict.content()
    Site.from_dict(content["site"])
    parse_plan(content["plan"], "")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(took, crossed, memory, time.monotonic() - begin, flush=True)
    for client in clients:
        print(file=client.told, flush=True)
    for _ in clients:
        os.wait()
    os._exit(0)


def loopback_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[1])


def main() -> int:
    from harness import Row, chosen, finish, parser, tell

    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--runs", type=int, default=3)
    args = arguments.parse_args()
    rows = []
    for case in chosen(args.cases, CASES):
        world, measured = CASES[case], []
        for run in range(args.runs):
            command = ["unshare", "--net", sys.executable, __file__, "--rank0", str(world)]
            words = subprocess.run(
                command, check=True, text=True, stdout=subprocess.PIPE
            ).stdout.split()
            measured.append([float(word) for word in words])
            tell(f"{case}: run {run + 1} of {args.runs}: {measured[-1][0]:.2f} s")
        seconds, crossed, memory, reading = (list(values) for values in zip(*measured))
        rows += [
            Row.median(case, "verdict", seconds, "s", False, TARGETS.get(world, "")),
            Row.median(case, "through rank 0", [size / 1e6 for size in crossed], "MB", False),
            Row.median(case, "memory of rank 0", [size / 1e6 for size in memory], "MB", False),
            Row.median(case, "one rank reads the verdict", reading, "s", False),
        ]
    return finish(rows, args.json, "from the last rank's report to the last rank's verdict")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank0"]:
        rank0_main(int(sys.argv[2]))
    else:
        raise SystemExit(main())
