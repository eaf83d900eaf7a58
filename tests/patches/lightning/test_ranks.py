from types import SimpleNamespace

import pytest

from holmes_ext.patches.lightning.ranks import _planned_node
from holmes_ext.runtime import session


@pytest.mark.parametrize("rank, processes, world, node", [(5, 2, 8, 2), (0, 2, 8, 0), (0, 1, 1, 7)])
def test_the_node_is_the_planned_one_where_a_launcher_gave_ranks(
    monkeypatch, rank, processes, world, node
):
    plan = SimpleNamespace(processes=processes, world_size=world)
    monkeypatch.setattr(session, "_active", SimpleNamespace(rank=rank, plan=plan))
    assert _planned_node(lambda: 7, None, (), {}) == node


def test_without_holmes_it_is_lightning_s_own(monkeypatch):
    monkeypatch.setattr(session, "_active", None)
    assert _planned_node(lambda: 7, None, (), {}) == 7
