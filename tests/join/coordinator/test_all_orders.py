"""Explores all orders of the messages of two to five joined jobs, with faults and a liar among them.

The rules of the coordinator are the real ones (class Coordinator); jobs, network and time are a model
(joined_model.py). From the start of a scene, each event that can happen next is tried: a job sends its
request, a job crashes, its connection is seen to be closed, a timeout passes while all wait. States that were
seen before are not explored again. In each state:

    identical data    jobs that commit a round apply the same data to the same weights (World checks this)
    progress          if nothing else goes wrong from now on, and all jobs poll in turn, then the jobs
                      that can exchange commit a round together within ROUNDS rounds
    no endless wait   no round takes more than MOST_TICKS timeouts
"""

import importlib
import inspect
import itertools
import random
import sys
import textwrap
from dataclasses import replace
from typing import Any

import pytest
from joined_explorer import (
    MOST_TICKS,
    Event,
    Explored,
    State,
    events_if_still,
    explore,
    faults,
    jobs_that_poll,
    perform,
    successors,
)
from joined_model import LIES, NAMES, Scene, World, Wrong
from joined_states import fingerprint

from holmes_ext.join.coordinator import settlement
from holmes_ext.join.coordinator.settlement import Settlement
from integration_tests.joined.mutants import MUTANTS, PACKAGE, Mutant
from tests.selection import full, seed

ROUNDS = 8
#: Jobs -> rounds that each job makes in an explored order of events.
ROUNDS_OF_JOBS = {2: 2, 3: 2, 4: 1, 5: 1}


def groups_that_can_exchange(world: World) -> list[list[str]]:
    """Return the largest sets of honest jobs that reach each other; one of them must commit a round soon."""
    scene = world.scene
    names = [job.name for job in world.honest]
    if scene.liar and scene.lie == "fails with one":
        # Nobody else sees which of the two does not answer: docs/joined_network.md.
        names = [name for name in names if name != scene.victim]
    if not set(scene.cut) <= set(names) or scene.relay:
        return [names]
    # Two that cannot exchange take part in turns.
    return [[name for name in names if name != left_out] for left_out in scene.cut]


def check_progress(world: World) -> None:
    """Raise Wrong if no jobs that can exchange commit a round together soon."""
    world = world.copy()
    if world.scene.crash and world.jobs[world.scene.crash].crashed and not world.noticed:
        world.notice()
    groups = groups_that_can_exchange(world)
    alive = [name for name, job in world.jobs.items() if not job.crashed]
    size = len(groups[0])
    can_commit = 0 < size and len(alive) <= 2 * size and not is_dispute_of_two(world, alive)
    if not can_commit and world.scene.policy == "next":
        return  # jobs with rounds=async train on meanwhile: they wait for no round
    begin = world.coordinator.state.number
    for _ in range(ROUNDS):
        world.play(1, most_ticks=MOST_TICKS)
        together = [world.committed_together(names) for names in groups if names]
        if can_commit and any(number > begin for number in set().union(*together)):
            return
    if can_commit:
        raise Wrong(f"none of {groups} has committed a round together after round {begin}")


def is_dispute_of_two(world: World, alive: list[str]) -> bool:
    """Return whether only two jobs are alive, which cannot exchange, or of which one seems to lie.

    None of the two goes on alone as long as both are there.
    """
    scene = world.scene
    if len(alive) != 2:
        return False
    is_cut = set(alive) == set(scene.cut) and not scene.relay
    return is_cut or (scene.liar in alive and scene.lie != "vanishes")


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


def scenes(jobs: int) -> dict[str, Scene]:
    """Return a scene for each combination of a cut pair, a crash and a liar.

    Of two or three jobs, the job that crashes is one of the cut pair; of more, these are different jobs.
    """
    names = NAMES[:jobs]
    crash = names[2] if jobs > 3 else names[1]
    cuts = {
        "": {},
        "a cut pair": {"cut": names[:2]},
        "a cut pair without relay": {"cut": names[:2], "relay": False},
    }
    crashes = {"": {}, "a crash": {"crash": crash}}
    liars = {"": {}} | {f"a liar that {lie}": {"liar": names[-1], "lie": lie} for lie in LIES}
    # Of more jobs, one is slow: any number of slow ones makes too many states.
    found = {
        "slow jobs": Scene(jobs, slow=names),
        "a slow first job": Scene(jobs, slow=names[:1]),
        "a slow last job": Scene(jobs, slow=names[-1:]),
    }
    if jobs > 3:
        del found["slow jobs"]
    for faults_of_scene in itertools.product(cuts.items(), crashes.items(), liars.items()):
        name = ", ".join(fault for fault, _ in faults_of_scene if fault) or "no fault"
        keywords = dict(item for _, fields in faults_of_scene for item in fields.items())
        found[name] = Scene(jobs, **keywords)
    return found


def scene_of(jobs: int, name: str, policy: str) -> Scene:
    return replace(scenes(jobs)[name], policy=policy, rounds=ROUNDS_OF_JOBS[jobs])


#: Jobs -> one of how many cases runs each time; nightly, all of them do.
SHARE_OF_JOBS = {2: 10, 3: 60, 4: 400, 5: 1000}
CASES = [
    (jobs, name, policy)
    for jobs in SHARE_OF_JOBS
    for name in scenes(jobs)
    for policy in ("ready", "next")
]
MARKED_CASES = [pytest.param(*case, marks=full(share=SHARE_OF_JOBS[case[0]])) for case in CASES]


@pytest.mark.parametrize("jobs, name, policy", MARKED_CASES)
def test_all_orders(jobs, name, policy):
    explored = explore(scene_of(jobs, name, policy), check_progress)
    assert explored.is_complete and explored.still
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


#: Mutant of integration_tests/joined/mutants.py: a fault that the rules once had -> scene that must show it.
EARLIER_FAULTS = {
    "an offer counts in several rounds": Scene(2, slow=("east", "north"), policy="next"),
    "late names count in the quorum": Scene(3, liar="south", lie="accuses one", policy="next"),
    "no failed pair uses the relay": Scene(2, cut=("east", "north")),
    "whoever is accused is dropped before the only accuser": Scene(
        3, liar="south", lie="accuses one"
    ),
}


def reintroduce(monkeypatch, mutant: Mutant) -> None:
    """Replace the function that a mutant breaks by the broken one, wherever it is imported."""
    module = importlib.import_module(
        f"{PACKAGE}.{mutant.file.removesuffix('.py').replace('/', '.')}"
    )
    classes = [item for item in vars(module).values() if inspect.isclass(item)]
    modules = [item for name, item in sys.modules.items() if name.startswith(module.__package__)]
    for owner in (module, *classes):
        for name, function in list(vars(owner).items()):
            if not inspect.isfunction(function) or function.__module__ != module.__name__:
                continue
            source = inspect.getsource(function)
            if mutant.old not in source:
                continue
            broken: dict[str, Any] = {}
            text = textwrap.dedent(source.replace(mutant.old, mutant.new))
            exec(f"from __future__ import annotations\n{text}", vars(module) | broken, broken)
            for user in (owner, *modules):
                if vars(user).get(name) is function:
                    monkeypatch.setattr(user, name, broken[name])
            return
    raise AssertionError(f"no function has {mutant.old!r}")


@pytest.mark.parametrize("is_reduced", [True, False], ids=["reduced", "all"])
@pytest.mark.parametrize("fault", EARLIER_FAULTS)
def test_an_earlier_fault_is_found(monkeypatch, fault, is_reduced):
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == fault]
    scene = EARLIER_FAULTS[fault]
    explore(scene, check_progress, is_reduced)
    reintroduce(monkeypatch, mutant)
    with pytest.raises(Wrong):
        explore(scene, check_progress, is_reduced)


SMALL_CASES = [case for case in MARKED_CASES if case.values[0] < 4]


@pytest.mark.parametrize("jobs, name, policy", SMALL_CASES)
def test_the_reduction_reaches_all_still_states(jobs, name, policy):
    """The property is checked in still states only: they are the same with all orders of requests."""
    scene = scene_of(jobs, name, policy)
    assert explore(scene, ignore).still == explore(scene, ignore, is_reduced=False).still


@pytest.mark.parametrize("jobs, name, policy", SMALL_CASES)
def test_states_with_equal_fingerprints_have_equal_futures(jobs, name, policy):
    """Compare the states that follow, for each state that is reached in several ways."""
    start = World(scene_of(jobs, name, policy))
    unexplored = [State(start, fingerprint(start))]
    following_of: dict[bytes, set[bytes]] = {}
    while unexplored and len(following_of) < 2000:
        state = unexplored.pop()
        if state.world.ticks == MOST_TICKS:
            continue
        following = successors(state, Explored(), ignore, is_reduced=False)
        marks = {successor.mark.world for successor in following}
        if state.mark.world not in following_of:
            following_of[state.mark.world] = marks
            unexplored += following
        assert following_of[state.mark.world] == marks


def ignore(world: World) -> None:
    """Check nothing."""
