"""The exploration of all orders of events (joined_explorer.py): it leaves out nothing, and finds faults."""

import importlib
import inspect
import pickle
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
    after,
    explore,
    faults,
    jobs_that_poll,
    private_request,
    successors,
)
from joined_model import Scene, World, Wrong
from joined_scenes import MARKED_CASES, check_progress, scene_of, scenes
from joined_states import fingerprint

from integration_tests.joined.mutants import MUTANTS, PACKAGE, Mutant
from tests.selection import full

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


@pytest.mark.parametrize("is_reduced", [True, pytest.param(False, marks=full(share=10))])
@pytest.mark.parametrize("fault", EARLIER_FAULTS)
def test_an_earlier_fault_is_found(monkeypatch, fault, is_reduced):
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == fault]
    scene = EARLIER_FAULTS[fault]
    explore(scene, check_progress, is_reduced)
    reintroduce(monkeypatch, mutant)
    with pytest.raises(Wrong):
        explore(scene, check_progress, is_reduced)


@pytest.mark.parametrize("policy", ["ready", "next"])
def test_jobs_that_take_weights_over_direct_connections_only_stay_behind(monkeypatch, policy):
    scene = scene_of(2, "a cut pair, a slow first job", policy)
    explore(scene, check_progress)

    def can_take_directly(world, taker, donor):
        return world.can_exchange(taker, donor, is_relayed=False)

    monkeypatch.setattr(World, "can_take", can_take_directly)
    with pytest.raises(Wrong):
        explore(scene, check_progress)


SMALL_CASES = [case for case in MARKED_CASES if case.values[0] < 4]


def small_scene(jobs: int, name: str, policy: str) -> Scene:
    """Return a scene that can be explored without the reduction: three jobs make one round."""
    scene = scene_of(jobs, name, policy)
    return replace(scene, rounds=1) if jobs == 3 else scene


@pytest.mark.parametrize("jobs, name, policy", SMALL_CASES)
def test_the_reduction_reaches_all_still_states(jobs, name, policy):
    """The property is checked in still states only: they are the same with all orders of requests."""
    scene = small_scene(jobs, name, policy)
    assert explore(scene, ignore).still == explore(scene, ignore, is_reduced=False).still


@pytest.mark.parametrize("policy", ["ready", "next"])
@pytest.mark.parametrize("name", scenes(2))
def test_the_reduction_reaches_all_still_states_of_one_round(name, policy):
    """Check the same in each run of the tests, for two jobs that make one round."""
    scene = replace(scene_of(2, name, policy), rounds=1)
    assert explore(scene, ignore).still == explore(scene, ignore, is_reduced=False).still


@pytest.mark.parametrize("jobs, name, policy", MARKED_CASES)
def test_private_requests_commute_with_other_events(jobs, name, policy):
    """Compare both orders of a private request and each event that can happen instead of it.

    If the event is the end of a connection, the coordinator may decide at the report that comes after it, or
    at the next request.
    """
    start = World(scene_of(jobs, name, policy))
    unexplored = [State(start, fingerprint(start))]
    seen = set()
    while unexplored and len(seen) < 500:
        state = unexplored.pop()
        if state.mark.world in seen:
            continue
        seen.add(state.mark.world)
        unexplored += successors(state, Explored(), ignore, is_reduced=True)
        world = state.world
        polls = [Event("poll", job.name) for job in jobs_that_poll(world)]
        polled = {poll.job: after(world, poll) for poll in polls}
        private = private_request(state, polled)
        if private is None:
            continue
        request = Event("poll", private.job)
        for event in [*polls, *faults(world)]:
            if event == request:
                continue
            request_first = after(private.successor.world, event)
            event_first = after(after(world, event), request)
            if fingerprint(request_first) != fingerprint(event_first):
                assert event.kind == "notice"
                assert fingerprint(after(request_first, request)) == fingerprint(event_first)


@pytest.mark.parametrize("policy", ["ready", "next"])
def test_events_in_a_copy_of_a_world_change_only_the_copy(policy):
    world = World(Scene(3, cut=("east", "north"), crash="south", policy=policy))
    for number in range(60):
        original = pickle.dumps(world)
        copy = world.copy()
        assert fingerprint(copy) == fingerprint(world)
        for name in world.jobs:
            if not copy.jobs[name].crashed:
                copy.train(name)
                copy.poll(name)
        if number == 40:
            copy.crash()
        if number == 45:
            copy.notice()
        if number % 20 == 19:
            copy.tick()
        assert pickle.dumps(world) == original
        world = copy
    assert world.coordinator.state.number > 2


@pytest.mark.parametrize("jobs, name, policy", SMALL_CASES)
def test_states_with_equal_fingerprints_have_equal_futures(jobs, name, policy):
    """Compare the states that follow, for each state that is reached in several ways."""
    start = World(small_scene(jobs, name, policy))
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
