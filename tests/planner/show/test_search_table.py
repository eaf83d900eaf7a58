"""planner.show.search_table: the text around the table of a search."""

from types import SimpleNamespace

import pytest

from holmes_ext.cli.show.table import Screen
from holmes_ext.planner.show import search_table


@pytest.mark.parametrize(
    "shapes, plans, text",
    [
        (1, 1, "1 shape, 1 plan worked out, 3 left out by their bound, 0 too large, 0.5 s"),
        (2, 0, "2 shapes, 0 plans worked out, 3 left out by their bound, 0 too large, 0.5 s"),
    ],
)
def test_counts(capsys, shapes, plans, text):
    result = SimpleNamespace(
        interrupted=False,
        optimality_gap=None,
        shapes=shapes,
        candidates=[object()] * plans,
        pruned=3,
        misfits=0,
        seconds=0.5,
        network=SimpleNamespace(links=SimpleNamespace(measured=())),
    )
    search_table._show_counts(Screen(), result)
    assert capsys.readouterr().out.strip() == text


def test_title_of_one_gpu():
    site = SimpleNamespace(clusters=("a",))
    result = SimpleNamespace(
        network=SimpleNamespace(site=site, world=1),
        model=SimpleNamespace(name="gpt"),
        global_batch=8,
    )
    assert search_table.title(result) == "gpt: 1 GPU, 1 cluster, global batch 8"
