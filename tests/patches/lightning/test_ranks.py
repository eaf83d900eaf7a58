from types import SimpleNamespace

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.patches.lightning.ranks import _planned_node
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime import session


@pytest.mark.parametrize("rank, processes, world, node", [(5, 2, 8, 2), (0, 2, 8, 0), (0, 1, 1, 7)])
def test_the_node_is_the_planned_one_where_a_launcher_gave_ranks(
    monkeypatch, rank, processes, world, node
):
    plan = SimpleNamespace(processes=processes, world_size=world, processes_of={})
    monkeypatch.setattr(session, "_active", SimpleNamespace(rank=rank, plan=plan))
    assert _planned_node(lambda: 7, None, (), {}) == node


def test_nodes_with_different_numbers_of_processes_are_refused(monkeypatch):
    """Lightning computes a rank as the node's number times the processes of a node, plus the local rank."""
    plan = Plan("digest", ("a0", "b0"), 2, processes_of={"a0": 2, "b0": 4})
    monkeypatch.setattr(session, "_active", SimpleNamespace(rank=0, plan=plan, store=None))
    with pytest.raises(HolmesError, match="equally many processes on every node .2 on a0, 4 on b0"):
        _planned_node(lambda: 7, None, (), {})


def test_without_holmes_it_is_lightning_s_own(monkeypatch):
    monkeypatch.setattr(session, "_active", None)
    assert _planned_node(lambda: 7, None, (), {}) == 7
