"""What a byte on a network costs this machine's cores, which are all hosts of a lab: a number for prediction.py's simulations.

The nodes of one fabric after the other all-reduce and do nothing else, while /proc/stat counts the seconds in which a core was not idle: those of
sockets, checksums, shaping, the switch and gloo's additions.
"""

from __future__ import annotations

import json
import os
import sys
from math import ceil
from pathlib import Path

from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.lab import Lab

SIZE, SECONDS = 4 * 2**20, 2.0


def measure_hosts(spec: SiteSpec) -> dict[str, float]:
    """Fabric -> CPU seconds of this machine for a byte that a node of its lab sends on it."""
    order = [node for cluster in spec.clusters for node in cluster.nodes]
    fabrics = [[cluster.name, f"{cluster.kind}0", list(map(order.index, cluster.nodes)), cluster.rate_bps] for cluster in spec.clusters if len(cluster.nodes) > 1]
    fabrics.append(["ethernet", "eth0", list(range(len(order))), spec.ethernet_rate_bps])
    with Lab(spec, realtime=True) as lab:
        result = lab.run([sys.executable, __file__, json.dumps(fabrics)], order=order, preload=("torch",), timeout=120)
        if result.returncode:
            raise SystemExit(f"prediction_hosts.py: an all-reduce failed: {result.outputs[result.first_failed or 0]}")
        return json.loads(result.stdout[0])


def rank_main(fabrics: list) -> None:
    """One rank of measure_hosts: in each fabric's group all-reduces one after the other, the others idle; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo")
    found, flat = {}, torch.ones(SIZE // 4)
    for name, interface, ranks, rate_bps in fabrics:
        mine, sent = dist.get_rank() in ranks, 2 * (len(ranks) - 1) * SIZE  # by all of them in one all-reduce
        times = ceil(SECONDS * rate_bps * len(ranks) / (8 * sent))
        if mine:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        group = dist.new_group(ranks)
        if mine:
            dist.all_reduce(flat, group=group)
        dist.barrier()
        before = busy_seconds()
        for _ in range(times if mine else 0):
            dist.all_reduce(flat, group=group)
        dist.barrier()
        found[name] = (busy_seconds() - before) / (times * sent)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


def busy_seconds() -> float:
    """CPU seconds that this machine's cores have not been idle since it started, interrupts included."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]))
