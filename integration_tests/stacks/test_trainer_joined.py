"""Tests joined jobs whose script uses transformers' Trainer and does not import holmes.

Joined jobs are separate training jobs that regularly average their weights (DiLoCo).
"""

import pytest

from integration_tests.jobs import ROOT
from integration_tests.joined.test_examples import OUTER, run

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TRAINER = [
    str(ROOT / "examples" / "trainer" / "train.py"),
    *"--layers 2 --hidden 32 --sequence 16 --steps 9".split(),
]


def command(micro_batch):
    return [*TRAINER, "--micro-batch", str(micro_batch), "--micro-batches", "2"]


@pytest.mark.full(share=4)
def test_trainers_of_different_sizes_train_alike(tmp_path):
    """Jobs that read the same data have the same pseudo-gradients and losses."""
    east, west = run(tmp_path, (2, command(2)), (1, command(4)), OUTER)
    assert len(east) == len(west) == 9
    assert max(abs(a - b) for a, b in zip(east, west)) < 1e-4, (east, west)


def test_trainers_read_different_parts(tmp_path):
    parts = [f"{OUTER},part={k}/2" for k in range(2)]
    east, west = run(tmp_path, (2, command(2)), (1, command(4)), parts)
    assert min(abs(a - b) for a, b in zip(east, west)) > 1e-5, "the same data"
    for name in ("east", "west"):
        assert "the script must make" not in (tmp_path / f"{name}.json.txt").read_text()
