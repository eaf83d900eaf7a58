"""The account of all rounds that the soak test prints (integration_tests/joined/accounting.py)."""

import pytest

from integration_tests.joined.accounting import account_of, holder_of, members_of, revoked_line

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
        "without a coordinator": 1,  # round 10
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


EAST_IS_IN = ["job east is here (1 rank, waiting)", "job east begins"]
REVOKED = [*EAST_IS_IN, "job east is gone: it was revoked", revoked_line("east")]
CERTIFIED = "job east has got its certificate"


@pytest.mark.parametrize(
    "coordinators, broken",
    [
        ([[*REVOKED, CERTIFIED, *EAST_IS_IN, "round 7: commit (east 1.00)"]], 0),
        ([REVOKED, [CERTIFIED, *EAST_IS_IN, "round 7: commit (east 1.00)"]], 0),
        ([[*REVOKED, "round 7: commit (west 1.00)"]], 0),
        ([[*REVOKED, "job east-2 has got its certificate", "job east-2 is here (1 rank, in)"]], 0),
        ([[*REVOKED, "round 7: commit (east 0.50, west 0.50)"]], 1),
        ([[*REVOKED[:-1], "round 7: commit (west 0.50, east 0.50)"]], 1),
        ([REVOKED, ["round 7: commit (east 0.50, west 0.50)"]], 1),
        ([[revoked_line("east"), "job east is here (1 rank, late)"]], 1),
        ([[*REVOKED, "job west has got its certificate", "job east is here (1 rank, in)"]], 1),
    ],
)
def test_a_revoked_job_takes_no_part_until_it_is_invited_again(coordinators, broken):
    promises = account_of(coordinators, ["east", "west"]).broken_promises
    assert len(promises) == broken and all("job east was revoked" in each for each in promises)


@pytest.mark.parametrize(
    "lines, is_broken",
    [
        (["job c-1 is here (1 rank, in)", "job east is here (1 rank, in)"], False),
        (["job c-1 is here (1 rank, in)", "job c-1 is here (1 rank, late)"], False),
        (
            ["job c-1 is here (1 rank, in)", "job c-1 is gone: x", "job c-2 is here (1 rank, in)"],
            False,
        ),
        (["job c-1 is here (1 rank, in)", "job c-2 is here (1 rank, waiting)"], True),
        (["round 3: commit (c-1 0.50, east 0.50)"], False),
        (["round 3: commit (c-1 0.25, c-2 0.25, east 0.50)"], True),
    ],
)
def test_a_holder_has_one_vote_whatever_its_names(lines, is_broken):
    promises = account_of([lines], ["c-1", "c-2", "east"]).broken_promises
    assert len(promises) == is_broken and all("holder c has 2 votes" in each for each in promises)
    # A restarted coordinator does not list the jobs of the former one.
    assert len(account_of([[line] for line in lines], ["c-1", "c-2", "east"]).broken_promises) == (
        is_broken and len(lines) == 1
    )


@pytest.mark.parametrize(
    "accusers, is_broken",
    [
        ("east, west", False),
        ("c-1, east", False),
        ("c-1, c-2", True),
        ("c-1, c-2, c-3", True),
        ("c-1, c-2, and 5 more", False),  # the line does not say who
    ],
)
def test_names_of_one_holder_exclude_no_job_alone(accusers, is_broken):
    lines = [f"round 4: job north is left out: jobs {accusers} accuse it: a lie"]
    promises = account_of([lines], ["north"]).broken_promises
    assert len(promises) == is_broken and all("excludes a job alone" in each for each in promises)
    two = ["round 4: job north is left out: jobs c-1 and north contradict each other: a lie"]
    assert not account_of([two], ["north"]).broken_promises


def test_rounds_of_all_names_of_a_holder_are_counted_together():
    lines = [
        "job east is here (1 rank, in)",
        "round 1: commit (east 1.00)",
        "job east is gone: it was revoked",
        "round 2: commit (west 1.00)",
        "job east-2 has got its certificate",
        "job east-2 is here (1 rank, in)",
        "round 3: void: job east-2 was lost on the way",
        "round 4: commit (west 0.50, east-2 0.50)",
    ]
    account = account_of([lines], ["east", "east-2", "west"])
    assert account.jobs == {
        "east: member": 2,
        "east: revoked": 1,
        "west: member": 2,
        "west: gone": 1,
    }
    again = account_of([lines[:3], ["round 2: commit (west 1.00)"]], ["east", "west"])
    assert again.jobs["east: revoked"] == 1, "a restarted coordinator refuses it, too"
    assert account.rounds["void: job JOB was lost on the way"] == 1


def test_names_and_members():
    assert holder_of("east") == holder_of("east-2") == holder_of("east-17") == "east"
    assert holder_of("far-east") == "far-east"
    assert members_of("round 3: commit (east 0.50, east-2 0.50)") == {"east", "east-2"}
    assert members_of("round 3: void: east is left out") == members_of("job east begins") == set()


@pytest.mark.parametrize(
    "lines, gaps",
    [
        # A newly started job begins another run, which the reconnecting job replaces.
        ([1, "job east is here (1 rank, in)", 101], {}),
        ([1, "job east is here (1 rank, in)", 101, 103], {"abandoned": 1}),
        ([1, 3], {"abandoned": 1}),
        (["job east is here (1 rank, in)", 101, 102], {}),
        (["job east is here (1 rank, in)", 108], {"without a coordinator": 7}),
        (
            ["job east is here (1 rank, in)", 100, "job east is here (1 rank, in)", 102],
            {"abandoned": 1},
        ),
    ],
)
def test_rounds_without_an_end_are_counted_once(lines, gaps):
    first = ["job east is here (1 rank, waiting)", "round 99: void: x", "round 100: void: x"]
    second = [line if isinstance(line, str) else f"round {line}: void: x" for line in lines]
    account = account_of([first, second], ["east", "west"])
    del account.rounds["void: x"]
    assert account.rounds == gaps
