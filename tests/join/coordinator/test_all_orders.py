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
from tests.selection import full

ROUNDS = 8


def jobs_that_can_exchange(world: World) -> list[str]:
    """Return the jobs that must commit a round together soon: honest ones that reach each other."""
    scene = world.scene
    names = [job.name for job in world.honest]
    if scene.cut and not scene.relay:
        # Two that cannot exchange take part in turns.
        names = [name for name in names if name not in scene.cut]
    if scene.liar and scene.lie == "fails with one":
        # Nobody else sees which of the two does not answer: docs/joined_network.md.
        names = [name for name in names if name != scene.victim]
    return names


def check_progress(world: World) -> None:
    """Raise Wrong if the jobs that can exchange do not commit a round together soon."""
    world = world.copy()
    if world.scene.crash and world.jobs[world.scene.crash].crashed and not world.noticed:
        world.notice()
    names = jobs_that_can_exchange(world)
    alive = [name for name, job in world.jobs.items() if not job.crashed]
    # Of two jobs that cannot exchange, neither goes on alone as long as both are there.
    can_commit = 2 * len(names) >= len(alive) and not (len(alive) == 2 and len(names) < 2)
    if is_dispute_of_two(world, alive):
        can_commit = False
    if not can_commit and world.scene.policy == "next":
        return  # jobs with rounds=async train on meanwhile: they wait for no round
    begin = world.coordinator.state.number
    for _ in range(ROUNDS):
        world.play(1, most_ticks=MOST_TICKS)
        if can_commit and any(number > begin for number in world.committed_together(names)):
            return
    if can_commit:
        raise Wrong(f"{names} have committed no round together after round {begin}")


def is_dispute_of_two(world: World, alive: list[str]) -> bool:
    """Return whether only two jobs are alive, and one says or causes that they cannot exchange."""
    disputes = ("accuses one", "accuses all", "fails with one", "fails with all")
    return len(alive) == 2 and world.scene.liar in alive and world.scene.lie in disputes


def walk(scene: Scene, seed: int) -> None:
    """Try one random order of events, and check the progress at its end."""
    chance = random.Random(seed)
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
    """Return scenes with one fault each, and with several at once from three jobs on."""
    names = NAMES[:jobs]
    cut, liar = names[:2], names[-1]
    found = {
        "no fault": Scene(jobs),
        "a slow job": Scene(jobs, slow=True),
        "a crash": Scene(jobs, crash=liar),
        "a cut pair": Scene(jobs, cut=cut),
        "a cut pair without relay": Scene(jobs, cut=cut, relay=False),
    }
    for lie in LIES:
        found[f"a liar that {lie}"] = Scene(jobs, liar=liar, lie=lie)
    if jobs > 2:
        found["a cut pair and a crash"] = Scene(jobs, cut=cut, relay=False, crash=names[2])
        found["a crash of one of a cut pair"] = Scene(jobs, cut=cut, relay=False, crash=names[1])
    if jobs > 3:
        for lie in LIES:
            found[f"a cut pair, a crash, and a liar that {lie}"] = Scene(
                jobs, cut=cut, relay=False, crash=names[2], liar=liar, lie=lie, rounds=1
            )
    return found


CASES = [
    (jobs, name, policy)
    for jobs in (2, 3, 4, 5)
    for name in scenes(jobs)
    for policy in ("ready", "next")
]


def scene_of(jobs: int, name: str, policy: str) -> Scene:
    return replace(scenes(jobs)[name], policy=policy)


@full(
    share=1000
)  # all of them are explored nightly; test_a_random_order_of_each_scene runs each time
@pytest.mark.parametrize("jobs, name, policy", CASES)
def test_all_orders(jobs, name, policy):
    explored = explore(scene_of(jobs, name, policy), check_progress)
    assert explored.is_complete and explored.still
    print(f"{explored.states} states, {len(explored.still)} of them still")


@pytest.mark.parametrize("policy", ["ready", "next"])
@pytest.mark.parametrize("jobs", [2, 3, 4, 5])
def test_a_random_order_of_each_scene(jobs, policy):
    for seed, name in enumerate(scenes(jobs)):
        walk(scene_of(jobs, name, policy), seed)


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
        for seed in range(10):
            walk(scene, seed)


#: Mutant of integration_tests/joined/mutants.py: a fault that the rules once had -> scene that must show it.
EARLIER_FAULTS = {
    "an offer counts in several rounds": Scene(2, slow=True, policy="next"),
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


SMALL_CASES = [case for case in CASES if case[0] == 2] + [
    pytest.param(*case, marks=full(share=100)) for case in CASES if case[0] == 3
]


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
