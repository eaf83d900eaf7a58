"""Explores all orders of the messages of two to five joined jobs, with faults and a liar among them.

The rules of the coordinator are the real ones (class Coordinator); jobs, network and time are a model
(joined_model.py). joined_explorer.py says which events there are, and of which orders one is enough. The
faults, and what must hold, are in joined_scenes.py.

    complete        each combination of at most one failed pair, one crash and one liar; all orders of
                    requests, of the crash, and of the end of its connection
    depth           each job makes two rounds (2 or 3 jobs) or one (4 or 5 jobs), and at most MOST_TICKS
                    timeouts pass; then each still state is played on for up to ROUNDS rounds, in one order
    time            a timeout passes only if no request changes anything, or once before requests of slow
                    jobs: any of 2 jobs, or the first or the last one of more
    rounds=async    of five jobs, or of four of which one crashes, at most one has its pseudo-gradient later
    places          the failed pair are the first two jobs, the liar is the last one, in order of arrival
    symmetry        is not used: the rules decide between equal jobs by their order of arrival

`make nightly` (HOLMES_TEST_FULL=1) explores all 406 scenes; any other run explores a sample of them
(SHARE_OF_JOBS), and one random order of 12 scenes for each number of jobs. A scene that is not explored to
the end fails the test, but for the 24 of five jobs with rounds=async of which one crashes: there, at most the
first MOST_STATES states are explored, those with the fewest timeouts first. Estimated from the seconds
below, all scenes take a quarter of an hour of one core.

Scenes that were run to the end, with the check of each still state, and their CPU seconds on a busy machine:

    jobs  rounds=  run to the end  states in all  largest scene  seconds
    2     sync     52 of 52                7,050            422        3
    3     sync     51 of 51               21,193          1,087       17
    4     sync     50 of 50               27,004          1,444       20
    5     sync     50 of 50               63,233          4,073       53
    2     async    52 of 52               14,785          1,110        9
    3     async    51 of 51              100,120          7,116       71
    4     async    50 of 50              164,231          7,667      129
    5     async    28 of 50               57,480         18,881       68
"""

import random

import pytest
from joined_explorer import Event, events_if_still, explore, faults, jobs_that_poll, perform
from joined_model import Scene, World, Wrong
from joined_scenes import MARKED_CASES, SHARE_OF_JOBS, check_progress, scene_of, scenes
from joined_states import fingerprint

from holmes_ext.join.coordinator import settlement
from holmes_ext.join.coordinator.settlement import Settlement
from tests.selection import seed

MOST_STATES = 20_000


def walk(scene: Scene, chance: random.Random) -> None:
    """Try one random order of events, and check the progress at its end."""
    world = World(scene)
    while True:
        before = fingerprint(world)
        events = [Event("poll", job.name) for job in jobs_that_poll(world)] + list(faults(world))
        chance.shuffle(events)
        for event in events:
            perform(world, event)
        if fingerprint(world) != before:
            continue
        events = list(events_if_still(world))
        if not events:
            break
        perform(world, chance.choice(events))
    check_progress(world)


@pytest.mark.parametrize("jobs, name, policy", MARKED_CASES)
def test_all_orders(jobs, name, policy):
    scene = scene_of(jobs, name, policy)
    is_large = jobs == 5 and policy == "next" and bool(scene.crash)
    explored = explore(scene, check_progress, most_states=MOST_STATES if is_large else 10**7)
    assert explored.still and (explored.is_complete or is_large)
    print(f"{explored.states} states, {len(explored.still)} of them still")


@pytest.mark.parametrize("policy", ["ready", "next"])
@pytest.mark.parametrize("jobs", SHARE_OF_JOBS)
def test_a_random_order_of_some_scenes(jobs, policy):
    chance = random.Random(f"{seed()} {jobs} {policy}")
    for name in chance.sample(list(scenes(jobs)), 12):
        walk(scene_of(jobs, name, policy), chance)


def void(settlement, round_state, failures, now):
    """Void each round with a failed pair, whoever reports it: the rule that one false report abused."""
    settlement._rounds.void(round_state, "its jobs could not exchange")


#: Broken rule -> (class or module, name of its function, what replaces it, scene that must show it).
BROKEN = {
    "received data is not compared": (
        settlement,
        "accusations_from_digests",
        lambda digests: {name: {} for name in digests},
        Scene(3, liar="south", lie="two faces"),
    ),
    "failed pairs are ignored": (
        settlement,
        "failures_of",
        lambda reports, members: {},
        Scene(3, cut=("east", "north"), relay=False),
    ),
    "a failed pair voids the round": (
        Settlement,
        "_repeat_without_failed_pairs",
        void,
        Scene(4, liar="west", lie="accuses one"),
    ),
    "silent members are waited for": (
        settlement,
        "patience_s",
        lambda members: float("inf"),
        Scene(2, liar="north", lie="vanishes"),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_is_found(monkeypatch, what):
    owner, name, replacement, scene = BROKEN[what]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(Wrong):
        for seed_of_walk in range(10):
            walk(scene, random.Random(seed_of_walk))
