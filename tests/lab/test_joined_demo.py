"""The page of `holmes demo --joined`, of a made-up run; the demo itself runs in the lab."""

import pytest
from holmes_lab.cli import joined_demo

from holmes_ext.cli.main import main

RESULT = {
    "jobs": [
        {
            "job": "east",
            "from": 0.0,
            "to": 20.0,
            "losses": [3.0, 2.0, 1.5],
            "seconds": [5.0, 1.0, 1.0],
        },
        {"job": "west", "from": 0.0, "to": 7.0, "losses": [3.0], "seconds": [6.0]},
        {"job": "west", "from": 9.0, "to": 9.5, "losses": [], "seconds": []},
    ],
    "events": ["12:00:00 job west is gone: <cut>", "12:00:01 round 1: commit (east 1.00)"],
    "rounds": 3,
    "rounds_of_both": 2,
    "came_back": True,
}


def test_the_page_has_the_losses_the_table_and_what_happened():
    page = joined_demo._report([joined_demo._row(one) for one in RESULT["jobs"]], RESULT)
    assert (
        "losses over time" in page and "<svg" in page and "3 rounds, 2 of them of both jobs" in page
    )
    assert "job west is gone: &lt;cut&gt;" in page and "commit" not in page


def test_too_few_steps(capsys):
    with pytest.raises(Exception, match="--steps must be 110 or more"):
        joined_demo.run(False, 20, "report.html")
    assert main(["demo", "--joined", "--steps", "x"]) == 2
