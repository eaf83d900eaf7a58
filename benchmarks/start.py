"""Measures how the start of a job scales with the number of ranks, up to 16,384.

    python benchmarks/start.py --json FILE

Every rank calls runtime/start/exchange.py with a report like that of a real rank: 8 ranks on a node, 9
NICs in a node, half of the nodes with InfiniBand and half with RoCE. Rank 0 makes the real plan (pipeline
4, tensor 8). The store is torch's TCPStore in rank 0's process. The other ranks are threads of 64
processes on the same machine, in a network namespace. All are connected to the store before the time
begins. One rank of a node communicates for the node (neighbours.py), and the other seven receive the
verdict (the site and the plan, by rank 0) from it.

    verdict    seconds from the report of the last rank until the last rank has the verdict. All ranks share
               the cores of this machine, so that the nodes' simultaneous work is done one after the
               other here.
    reading    seconds in which a rank reads site and plan from JSON. In a real job each rank has its own
               cores.
    bytes      bytes on the loopback of the namespace: of the messages of rank 0
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
#: Number of ranks -> target for the seconds to the verdict.
TARGETS = {4096: "<= 3", 16384: "<= 20"}
PER_NODE = 8  # ranks of a node
PROCESSES = 64  # each with a part of the ranks as threads
TIMEOUT_S = 300.0


def report(rank: int, world: int) -> dict:
    """Return the report of a rank to rank 0 at the start of a job, of the size of a real report.

    Returns:
        "node", "identity" (of its boot), "local_rank", and "agreed": settings that must be the same
        on all ranks. The first rank of a node adds "nics_of_node": an Ethernet NIC and 8 InfiniBand
        or RoCE NICs.

    Args:
        rank: The rank.
        world: Number of all ranks.
    """
    from holmes_ext.cluster.nic import Nic
    from holmes_ext.cluster.node_report import NodeReport

    node, local = divmod(rank, PER_NODE)
    high, low = divmod(node, 256)
    ib = 2 * node * PER_NODE < world  # the first half of the nodes has InfiniBand
    # As many settings as a real rank reports; all ranks must agree on them.
    agreed = {f"setting {number}": "value" for number in range(24)}
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
            port=1,
            netdevs=(f"net{hca}",),
            state="up",
            state_text="ACTIVE",
            rate_bps=2 * 10**11,
            addresses=(f"11.{high}.{low}.{hca + 1}/8",),
            subnet_prefix="fec0:0000:0000:0001" if ib else "",
            pci=f"0000:{hca:02x}:00.0",
            driver="mlx5_core",
        )
        for hca in range(8)
    )
    nics = NodeReport(
        name=document["node"],
        identity=document["identity"],
        ethernet=f"10.{high}.{low}.1",
        nics=(ethernet, *fast),
    )
    return {**document, "nics_of_node": nics.to_dict()}


def process(rank: int, world: int, port: int):
    """Return the numbers and the address that a launcher such as torchrun gives one rank.

    Args:
        rank: Number of the rank.
        world: Number of all ranks.
        port: Of the TCPStore on rank 0, which is on this machine.

    Returns:
        A holmes_ext.runtime.start.launcher.Process.
    """
    from holmes_ext.runtime.start.launcher import Process

    return Process(
        rank=rank,
        world_size=world,
        local_rank=rank % PER_NODE,
        local_world_size=PER_NODE,
        master_addr="127.0.0.1",
        master_port=port,
        launcher="benchmark",
    )


@dataclass(frozen=True)
class RankProcess:
    """Process with some ranks as threads, and its pipes to and from rank 0's process."""

    output: TextIO  # lines that the process prints
    commands: TextIO  # a line goes on with the next part of the measurement

    @classmethod
    def forked(cls, first: int, last: int, world: int, port: int) -> RankProcess:
        """Fork a process with the ranks from `first` to `last` - 1.

        Args:
            world: Number of all ranks.
            port: Of the store in rank 0's process.
        """
        out_read, out_write = os.pipe()
        in_read, in_write = os.pipe()
        if os.fork() == 0:
            # The child process. run_ranks() ends it by os._exit() and never returns.
            commands = open(in_read)  # noqa: SIM115 - until the process ends
            results = open(out_write, "w")  # noqa: SIM115
            run_ranks(first, last, world, port, commands, results)
        os.close(out_write)
        os.close(in_read)
        return cls(open(out_read), open(in_write, "w"))


def run_ranks(
    first: int, last: int, world: int, port: int, commands: TextIO, results: TextIO
) -> None:
    """Simulate the start of some ranks of a job, each as a thread of this process.

    Every rank connects to the store and waits for a line from rank 0. Then it sends rank 0 a report
    on its NICs, and receives the plan. The process prints a line: when its last rank had the plan,
    and the number of its ranks. The process ends here.

    Args:
        first, last: The ranks from `first` to `last` - 1.
        world: Number of all ranks.
        port: Of the store.
        commands: Lines from rank 0.
        results: Lines to rank 0.
    """
    from holmes_ext.runtime.start.exchange import exchange
    from holmes_ext.runtime.start.store import connect

    threading.stack_size(256 * 1024)
    # Thousands of threads that wait for the interpreter check for it once in this interval.
    sys.setswitchinterval(1.0)
    ends = []  # times at which ranks had the verdict
    ready = threading.Semaphore(0)
    go = threading.Event()

    def rank_main(rank: int) -> None:
        """Connect as one rank, exchange its report for the plan, and append the time to `ends`."""
        rank_process = process(rank, world, port)
        rank_report = report(rank, world)
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
    """Run rank 0 of a simulated start: collect the reports of all ranks, and send them the plan.

    The other ranks are threads of PROCESSES further processes. The function prints one line with
    four numbers: seconds from the last report until the last rank has the plan, bytes that crossed
    the loopback network meanwhile, bytes of rank 0's memory, and seconds that a rank needs to parse
    the site and the plan.

    Args:
        world: Number of ranks.
    """
    import torch.distributed  # noqa: F401 - once, for the clients too

    from holmes_ext.cluster.site import Site
    from holmes_ext.options import Options
    from holmes_ext.plan.maker import PlanRequest
    from holmes_ext.plan.plan import parse_plan
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.runtime.start.exchange import exchange
    from holmes_ext.runtime.start.store import connect

    # In the new network namespace, the loopback interface is down at first.
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    # The store has a connection (a file) for each rank.
    _soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    port = 29500
    request = PlanRequest(Options(), Sizes(pipeline=4, tensor=8))

    def decide(reports, nodes):
        """Return the message of rank 0 to all ranks: the site, the plan, and lines for the user.

        Args:
            reports: The report of each rank, by its number. Not needed here.
            nodes: The nodes that the ranks have reported, with their NICs.
        """
        site, plan = request.make_plan(nodes)
        return {"site": site.to_dict(), "plan": plan.to_json(), "source": plan.source, "lines": []}

    # Rank 0 is this process. The others have about equally many ranks.
    borders = [1, *(world * number // PROCESSES for number in range(1, PROCESSES + 1))]
    processes = [
        RankProcess.forked(first, last, world, port) for first, last in zip(borders, borders[1:])
    ]
    store = connect(process(0, world, port), TIMEOUT_S, is_host=True)
    for ranks in processes:
        assert ranks.output.readline() == "ready\n"
    before = loopback_bytes()
    begin = time.monotonic()
    for ranks in processes:
        print(file=ranks.commands, flush=True)  # they exchange their reports now
    verdict = exchange(store, process(0, world, port), report(0, world), decide, TIMEOUT_S)
    # Of each process: the time at which its last rank had the verdict, and the number of its ranks.
    lines = [ranks.output.readline().split() for ranks in processes]
    assert sum(int(count) for _, count in lines) == world - 1
    took = max(float(end) for end, _ in lines) - begin
    crossed = loopback_bytes() - before
    begin = time.monotonic()
    content = verdict.content()
    Site.from_dict(content["site"])
    parse_plan(content["plan"], "")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(took, crossed, memory, time.monotonic() - begin, flush=True)
    for ranks in processes:
        print(file=ranks.commands, flush=True)  # they end now
    for _ in processes:
        os.wait()
    os._exit(0)


def loopback_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[1])


def main() -> int:
    """Measure how fast all ranks of a large job agree on a plan, and write the rows of results.

    Each run is a separate process (--rank0 RANKS), in a network namespace of its own: its
    loopback interface then carries nothing but this run, and its bytes can be counted.
    """
    from harness import Row, chosen_cases, finish, parser, tell

    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--runs", type=int, default=3)
    args = arguments.parse_args()
    rows = []
    for case in chosen_cases(args.cases, CASES):
        world, measured = CASES[case], []
        for run in range(args.runs):
            command = ["unshare", "--net", sys.executable, __file__, "--rank0", str(world)]
            words = subprocess.run(
                command, check=True, text=True, stdout=subprocess.PIPE
            ).stdout.split()
            measured.append([float(word) for word in words])
            tell(f"{case}: run {run + 1} of {args.runs}: {measured[-1][0]:.2f} s")
        # By run: seconds until all ranks have the plan, bytes through rank 0, bytes of its memory,
        # and seconds that one rank needs to parse the plan.
        seconds, crossed, memory, reading = (list(values) for values in zip(*measured))
        rows += [
            Row.median(
                case, "verdict", seconds, unit="s", emulated=False, target=TARGETS.get(world, "")
            ),
            Row.median(
                case, "through rank 0", [size / 1e6 for size in crossed], unit="MB", emulated=False
            ),
            Row.median(
                case, "memory of rank 0", [size / 1e6 for size in memory], unit="MB", emulated=False
            ),
            Row.median(case, "one rank reads the verdict", reading, unit="s", emulated=False),
        ]
    return finish(rows, args.json, "from the last rank's report to the last rank's verdict")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank0"]:
        rank0_main(int(sys.argv[2]))
    else:
        raise SystemExit(main())
