"""The account of all rounds that the soak test prints (integration_tests/joined/accounting.py)."""

from integration_tests.joined.accounting import account_of

FIRST = [
    "job east is here (1 rank, waiting)",
    "job east begins",
    "round 1: commit (east 1.00)",
    "job west is here (2 ranks, waiting)",
    "job west begins, with the weights of east",
    "round 2: commit (east 1.00)",
    "round 3: commit (east 0.50, west 0.50)",
    "round 4 goes on without job west, which is late",
    "job west was waited for 3 times in vain: it sits out until round 7",
    "round 4: commit (east 1.00)",
    "job west is back",
    "round 5: commit (east 1.00)",
    "round 7: job west is left out: its pseudo-gradient is not finite",
    "round 7: commit (east 1.00)",
    "round 8: void: 1 of min=2 jobs; west is left out: it is 31.5 times longer than usual",
    "job west is gone: its connection was closed",
    "round 9: commit (east 1.00)",
]
SECOND = [
    "job east is here (1 rank, in)",
    "round 11: commit (east 1.00)",
    "round 12: void: ",
]


def test_every_round_and_every_job_in_it_is_accounted_for():
    account = account_of([FIRST, SECOND], ["east", "west"])
    assert account.rounds == {
        "committed": 8,
        "void: N of min=N jobs; JOB is left out: it is N times longer than usual": 1,
        "void: ": 1,
        "abandoned": 1,  # round 6
    }
    assert account.jobs == {
        "east: member": 8,
        "west: gone": 3,
        "west: taking weights": 1,
        "west: member": 1,
        "west: late": 1,
        "west: sitting out": 1,
        "west: left out": 1,
    }
    assert account.unexplained == ["round 12: void: "]
