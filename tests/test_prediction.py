"""benchmarks/prediction.py where it runs nothing.

It has the paper's three ratios, and every lab case can be predicted.
"""

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture
def prediction(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import prediction

    yield prediction
    for name in (
        "prediction",
        "prediction_hosts",
        "prediction_paper",
        "prediction_recorded",
        "harness",
    ):
        sys.modules.pop(name, None)


def test_the_papers_ratios_are_predicted_within_15_percent(prediction):
    rows = [row for row in prediction.paper_rows() if row.target]
    assert len(rows) == 3 and all(row.met for row in rows), [
        (row.metric, row.value) for row in rows
    ]


def test_every_case_is_predicted_and_holmes_is_faster_than_stock(prediction):
    from holmes_ext.plan.cost.links import Links

    seconds = {
        case.name: prediction.predict(case, Links(), (1e-4, 1e-9, 1e-3))
        for case in prediction.CASES
    }
    assert len(seconds) >= 24
    for name in ("deepspeed 2+2", "deepspeed 4+4", "megatron 2+2", "megatron 4+4", "deepspeed 2+4"):
        assert seconds[f"{name} holmes"] < seconds[f"{name} stock"]


def test_calibration_finds_the_overheads_that_made_its_runs(prediction):
    from holmes_ext.plan.cost.links import Links

    overheads = (2e-3, 5e-9, 4e-3)
    runs = {
        case.name: [prediction.predict(case, Links(), overheads)] for case in prediction.CALIBRATION
    }
    measured = prediction.Measured(steps=runs)
    for engine in ("deepspeed", "megatron", "plain"):
        assert prediction.calibrate(engine, measured) == pytest.approx(overheads, rel=1e-3)


def test_what_other_benchmarks_recorded_is_predicted(prediction):
    """Figures are results/prediction.json's business: whoever measures anew must not turn this red."""
    rows = prediction.recorded_rows(prediction)
    predicted = [row for row in rows if row.metric == "predicted step"]
    assert len(predicted) == len([row for row in rows if row.metric == "error"]) and all(
        row.value > 0 for row in predicted
    )
