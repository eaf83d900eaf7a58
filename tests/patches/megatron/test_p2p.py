"""The groups over which megatron-core's pipeline sends.

A batch of NCCL's makes the communicator of ALL ranks of its group at first use (torch's
ProcessGroupNCCL, where no device is bound). So if one rank uses a group, all ranks of the group
must use it.
"""

import functools
import random
from types import SimpleNamespace

import pytest
import random_sites
import torch

from holmes_ext.options import Options
from holmes_ext.patches.megatron import p2p
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import groups
from holmes_ext.runtime import session
from holmes_ext.runtime.groups import mailbox
from holmes_ext.runtime.groups import pairs as pairs_of_stages
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.launcher import Process


class Group:
    """A process group as one of its ranks sees it."""

    def __init__(self, ranks, me, purpose=""):
        self.ranks, self.me, self.purpose = tuple(ranks), me, purpose

    def rank(self):
        return self.ranks.index(self.me)


@pytest.fixture
def used(monkeypatch):
    """Return a function that lists the groups over which a rank sends or receives in batches.

    Its arguments are (site, plan, rank, ranks, ring, stage links): `rank` of the pipeline group
    `ranks`; with stage links, stage_links.py makes the groups. Each group is given by its ranks.
    """
    now = SimpleNamespace()
    monkeypatch.setattr(
        p2p, "registry", lambda: SimpleNamespace(is_on=lambda name: now.stage_links)
    )
    monkeypatch.setattr(p2p, "_is_schedule_interleaved", lambda: now.ring)
    monkeypatch.setattr(
        mailbox, "pair_group", lambda members, purpose, pipeline: Group(members, now.rank, purpose)
    )
    monkeypatch.setattr("torch.distributed.get_rank", lambda: now.rank)
    monkeypatch.setattr(session, "_active", None)
    for module in (p2p, pairs_of_stages):
        monkeypatch.setattr(
            module, "pair_group", lambda members, purpose, pipeline: Group(members, now.rank)
        )
        monkeypatch.setattr(module, "backend_of", lambda group: "nccl")
    monkeypatch.setattr(
        "torch.distributed.get_process_group_ranks", lambda group: list(group.ranks)
    )

    def used(site, plan, rank, ranks, ring, stage_links=False):
        now.rank, now.ring, now.stage_links = rank, ring, stage_links
        session._active = Session(
            Options(), Process(0, 1, 0, 1, "", 0, ""), site, plan, rank, maker=maker
        )
        group, over = Group(ranks, rank), []

        def framework(*, group, prev_pipeline_rank, next_pipeline_rank, **tensors):
            peers = (
                {prev_pipeline_rank}
                if any(tensors[f"tensor_{way}_prev"] for way in ("send", "recv"))
                else set()
            )
            peers |= (
                {next_pipeline_rank}
                if any(tensors[f"tensor_{way}_next"] for way in ("send", "recv"))
                else set()
            )
            assert peers <= set(group.ranks), "a tensor for a rank that is not in the group"
            if peers:
                over.append(group.ranks)
                assert group.purpose in ("", "pipeline activations"), (
                    "the other end uses another group"
                )
            return []

        place, last = ranks.index(rank), len(ranks) - 1
        before, after = (place > 0 or ring), (place < last or ring)
        p2p._start_batch_with_each_neighbour(
            framework,
            None,
            (),
            dict(
                group=group,
                prev_pipeline_rank=ranks[place - 1],
                next_pipeline_rank=ranks[(place + 1) % len(ranks)],
                tensor_recv_prev=before,
                tensor_send_prev=before,
                tensor_send_next=after,
                tensor_recv_next=after,
            ),
        )
        return over

    return used


@functools.cache
def planned(seed):
    """Return a random site and its plan."""
    rng = random.Random(seed)
    site = random_sites.site(rng)
    return site, build_plan(site, random_sites.sizes(rng, site.world_size))


@pytest.mark.full(share=4)
@pytest.mark.parametrize("stage_links", [False, True], ids=["", "stage_links"])
@pytest.mark.parametrize("ring", [False, True], ids=["plain", "interleaved"])
def test_a_group_that_one_rank_sends_batches_over_is_used_by_all_its_ranks(used, ring, stage_links):
    seen = 0
    for seed in range(200):
        site, plan = planned(seed)
        for ranks in (
            groups(plan.sizes, "pipeline") if plan.sizes and plan.sizes.pipeline > 1 else ()
        ):
            of_rank = {rank: used(site, plan, rank, ranks, ring, stage_links) for rank in ranks}
            for rank, over in of_rank.items():
                for members in over:
                    idle = [other for other in members if members not in of_rank[other]]
                    assert not idle, (
                        f"seed {seed}: rank {rank} sends over {members}, {idle} never do"
                    )
            seen += any(len(over) < len(ranks) for used_by in of_rank.values() for over in used_by)
    assert seen > 20, "hardly a site has pairs of their own"


def test_one_group_for_all_where_no_pair_has_anything_faster(used):
    site = SimpleNamespace()
    ethernet = SimpleNamespace(name="ethernet")
    plan = SimpleNamespace(fabric_of=lambda ranks, network_api: ethernet, world_size=4)
    assert used(site, plan, 1, (0, 1, 2, 3), False) == [(0, 1, 2, 3)]


@pytest.mark.parametrize("second_group", [None, "second group"])
def test_an_output_keeps_its_memory_while_it_is_sent(monkeypatch, second_group):
    """megatron-core may free an output by `.data = ...` after it has started to send it.

    Args:
        second_group: Group of the two stages that holmes made for one direction; None if megatron-core's
            own function starts the messages in the pipeline group.
    """
    groups = p2p._NeighbourGroups(second_group=second_group)
    monkeypatch.setattr(p2p, "neighbour_groups_of", lambda group: groups)
    sent = []  # tensors that torch, or megatron-core's function, was given to send
    monkeypatch.setattr("torch.distributed.isend", lambda tensor, *_, **__: sent.append(tensor))

    def megatrons_p2p_ops(*, tensor_send_next, **other_arguments):
        sent.append(tensor_send_next)

    output = torch.tensor([1.0, 2.0])
    arguments = {
        "tensor_send_prev": None,
        "tensor_recv_prev": None,
        "tensor_send_next": output,
        "tensor_recv_next": None,
        "group": Group((0, 1), 0),
        "prev_pipeline_rank": 1,
        "next_pipeline_rank": 1,
    }
    p2p._start_each_in_pair_group(megatrons_p2p_ops, None, (), arguments)

    output.data = torch.empty(1)  # as megatron-core frees an output
    assert [tensor.tolist() for tensor in sent] == [[1.0, 2.0]]
