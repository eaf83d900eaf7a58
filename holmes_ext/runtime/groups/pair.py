"""A process group of two ranks that only these two make.

torch.distributed.new_group(use_local_synchronization=True) is meant for that, but names the group after its ranks and the number of
groups that the process is in (_hash_ranks_to_str). Ranks of different stages are in different numbers of groups (only some
have embeddings): the two look for each other under two names and wait for ever. So the name is given here.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

#: How often this process has made a group of a pair: a name must not come back, its keys are still in the store.
_count: Counter = Counter()


def new_pair_group(ranks: list[int], purpose: str, **options):
    """A new group of `ranks`, at whose making no other rank takes part; options: new_group's.

    All members must make their groups of the same ranks and purpose in the same order.
    """
    import torch.distributed as dist

    key = (*ranks, purpose)
    _count[key] += 1
    with _name(f"holmes {purpose} {'-'.join(map(str, ranks))} {_count[key]}"):
        return dist.new_group(ranks, use_local_synchronization=True, group_desc=purpose, **options)


@contextmanager
def _name(name: str):
    from torch.distributed import distributed_c10d

    own = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        distributed_c10d._process_group_name = own
