"""Tests that each process group of a job uses the network that holmes's plan gives it, for random clusters.

The jobs run without communication, with torch's fake process group.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import random_sites

from holmes_ext.options import Options
from holmes_ext.patches.torch import groups as torch_groups
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.plan import parse_plan
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process

RUNNING = """
import json, random, sys
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import random_sites
from holmes_ext.options import Options
from holmes_ext.patches import registry
from holmes_ext.plan.build import build_plan
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process


class Store(FakeStore):
    def compare_set(self, key, expected, desired):
        return desired.encode()


registry().enable(["nics"])
jobs = []
for seed in map(int, sys.argv[1:]):
    rng = random.Random(seed)
    site = random_sites.site(rng)
    plan = build_plan(site, random_sites.sizes(rng, site.world_size))
    rank = rng.randrange(plan.world_size)
    process = Process(rank, plan.world_size, 0, 1, "", 0, "test")
    current = session.Session(Options(), process, site, plan, rank)
    session.set_active(current)
    dist.init_process_group("fake", store=Store(), rank=rank, world_size=plan.world_size)
    for kind, ranks in plan.groups():
        if kind != "world":
            dist.new_group(ranks, group_desc=kind)
    dist.new_subgroups(plan.processes)
    for _ in range(5):  # as a script likes
        dist.new_group(rng.sample(range(plan.world_size), rng.randint(1, plan.world_size)))
    dist.destroy_process_group()
    used = [[record.name, record.ranks, record.transport.fabric] for record in current.groups]
    jobs.append({"plan": plan.to_json(), "rank": rank, "groups": used})
print(json.dumps(jobs))
"""


def test_every_group_is_made_on_the_network_that_the_plan_has_for_it():
    command = [sys.executable, "-W", "ignore", "-c", RUNNING, *map(str, range(40))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    jobs = json.loads(done.stdout.splitlines()[-1])
    for job in jobs:
        plan = parse_plan(job["plan"], "p.json")
        planned = {
            (kind, ranks)
            for kind, ranks in plan.groups()
            if job["rank"] in ranks and kind != "world"
        }
        made = {(name, tuple(sorted(ranks))): fabric for name, ranks, fabric in job["groups"]}
        assert planned <= set(made)
        for name, ranks, fabric in job["groups"]:
            used = plan.fabric_of(ranks)
            assert fabric == (used.name if used else "local"), (name, ranks)
        for kind, listed in plan.transports.items():
            groups = [ranks for other, ranks in plan.groups() if other == kind]
            for ranks, fabric in zip(groups, listed if len(listed) > 1 else listed * len(groups)):
                assert made.get((kind, ranks), fabric) == fabric
    assert {fabric for job in jobs for *_, fabric in job["groups"]} >= {
        "local",
        "ethernet",
        "f0",
        "f1",
        "f2",
    }


@pytest.mark.parametrize("seed", range(40))
def test_gloo_gets_the_interface_and_nccl_the_network_of_what_the_plan_says(seed, monkeypatch):
    """When torch makes a group, gloo gets the interface and NCCL the network that the plan has for the group.

    The test wraps a fake of torch's function that makes groups, as holmes wraps the real one. For each group
    and some of its ranks, it checks what the fake gets from holmes.
    """
    rng = random.Random(seed)
    site = random_sites.site(rng)  # random nodes and networks
    built_plan = build_plan(site, random_sites.sizes(rng, site.world_size))
    plan = parse_plan(built_plan.to_json(), built_plan.source)

    # Holmes passes the name of NCCL's network in options of the NCCL backend. Here it passes the bare name.
    def net_name(current, ranks, *others):
        return current.transport(ranks, "nccl").net_name

    monkeypatch.setattr(torch_groups, "planned_nccl_options", net_name)
    # Would communicate with other ranks.
    monkeypatch.setattr(torch_groups, "agree_on_patches", lambda *_, **__: None)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    seen = []  # for each call of the fake: (gloo's interface, NCCL's network)

    def fake_new_process_group(
        group_size,
        group_rank,
        global_ranks_in_group,
        backend,
        store,
        group_name,
        backend_options=None,
        timeout=None,
    ):
        import os

        # gloo reads its interface from the environment.
        seen.append((os.environ.get("GLOO_SOCKET_IFNAME"), backend_options))

    for kind, ranks in plan.groups():
        names = {plan.node_of(rank) for rank in ranks}
        # The networks that the backends can use among these nodes, computed without the plan.
        gloo_network = random_sites.network(site, names, "gloo")
        nccl_network = random_sites.network(site, names, "nccl")
        for rank in rng.sample(ranks, min(3, len(ranks))):
            # Makes this process the rank of a holmes job.
            process = Process(rank, plan.world_size, 0, 1, "", 0, "test")  # 1 process on its node
            monkeypatch.setattr(
                session,
                "_active",
                session.Session(Options(), process, site, plan, rank, maker=maker),
            )
            arguments = len(ranks), 0, list(ranks), "cpu:gloo,cuda:nccl", None, kind, None
            # A wrapper gets the wrapped function, no instance, and the arguments.
            torch_groups._give_group_its_nic(fake_new_process_group, None, arguments, {})
            interface, net_name = seen.pop()
            if gloo_network == "local":  # all ranks are on one node
                assert interface == "lo"
            else:
                node = site.node_by_name[plan.node_of(rank)]
                assert interface == node.port(gloo_network).interface
            # "Socket" and "IB" are NCCL's names for TCP and RDMA (InfiniBand, RoCE).
            if nccl_network == "local":
                assert net_name == ""
            elif nccl_network == "ethernet":
                assert net_name == "Socket"
            else:
                assert net_name == "IB"
