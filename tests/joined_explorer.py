"""Exploration of all orders of events among joined jobs (the model of joined_model.py).

explore() begins at the start of a scene and tries each event that can happen next:

    poll         a job sends its request, and does what the reply says; or it reports, and gets no reply yet
    crash        the job that may crash does
    notice       the coordinator sees that the connection of the crashed job is closed
    early tick   once, a timeout passes although slow jobs could go on; all others wait
    train        a job has a new pseudo-gradient (rounds=async); of five jobs, four have at once
    tick         a timeout passes

The last two happen only in still states, in which no request changes anything. A state that was
reached before (an equal fingerprint: joined_states.py) is not explored again.

Most orders of requests lead to the same still state. With `is_reduced`, a private request, if there is one,
is the only event that is explored in a state: one that commutes with all events that can happen before it
(partial-order reduction with ample sets of one event; Clarke, Grumberg, Peled: Model Checking, chapter 10).
Such a reduction reaches all still states. test_explorer.py shows this for 2 and 3 jobs, and for 2 to 5 jobs
that private requests commute with the other events of their states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from joined_model import ModelJob, Scene, World
from joined_states import Fingerprint, fingerprint

#: Timeouts that pass in an order of events: later states are not explored further.
MOST_TICKS = 6
#: Jobs of which each may have a pseudo-gradient at another time than the others.
_MOST_TO_TRAIN_ALONE = 4


class Event(NamedTuple):
    """Something that happens in a world."""

    kind: str
    job: str = ""  # to which it happens


class State(NamedTuple):
    """World with its fingerprint."""

    world: World
    mark: Fingerprint


@dataclass
class Explored:
    """Result of an exploration."""

    states: int = 0
    still: set[bytes] = field(default_factory=set)  # fingerprints of still states
    is_complete: bool = True


def explore(
    scene: Scene,
    check: Callable[[World], None],
    is_reduced: bool = True,
    most_states: int = 10**7,
) -> Explored:
    """Explore all orders of the events of a scene.

    Args:
        scene: Jobs and faults.
        check: Called with each still state; raises an exception if a property does not hold there.
        is_reduced: Explore one order of events where their order makes no difference.
        most_states: States after which the exploration ends.
    """
    explored = Explored()
    start = World(scene)
    start_mark = fingerprint(start)
    seen = {start_mark.world}
    # Worlds to explore, by the timeouts that have passed. So each state is explored with the fewest timeouts
    # with which it can be reached, and MOST_TICKS cuts off nothing else.
    layers: list[list[State]] = [[] for _ in range(MOST_TICKS + 2)]
    layers[0].append(State(start, start_mark))
    for layer in layers:
        while layer and explored.is_complete:
            state = layer.pop()
            for successor in successors(state, explored, check, is_reduced):
                if successor.mark.world not in seen:
                    seen.add(successor.mark.world)
                    layers[successor.world.ticks].append(successor)
            explored.is_complete = len(seen) < most_states
    explored.states = len(seen)
    return explored


def successors(
    state: State, explored: Explored, check: Callable[[World], None], is_reduced: bool
) -> list[State]:
    """Return the worlds after each event that must be explored in a state; check it if it is still."""
    world = state.world
    polled = {job.name: after(world, Event("poll", job.name)) for job in jobs_that_poll(world)}
    private = private_request(state, polled) if is_reduced else None
    if private is not None:
        return [private.successor]
    changed_by = {
        name: State(following, fingerprint(following)) for name, following in polled.items()
    }
    polls = [successor for successor in changed_by.values() if successor.mark != state.mark]
    may_go_on = [name for name, successor in changed_by.items() if successor.mark != state.mark]
    events = list(faults(world))
    if not world.early_ticks and may_go_on and set(may_go_on) <= set(world.scene.slow):
        events.append(Event("early tick"))
    if not polls:
        explored.still.add(state.mark.world)
        check(world)
        events += events_if_still(world)
    worlds = [after(world, event) for event in events]
    return [*polls, *(State(following, fingerprint(following)) for following in worlds)]


def after(world: World, event: Event) -> World:
    """Return a copy of a world, after an event."""
    following = world.copy()
    perform(following, event)
    return following


def perform(world: World, event: Event) -> None:
    """Let an event happen."""
    if event.kind == "poll":
        world.poll(event.job)
    elif event.kind == "crash":
        world.crash()
    elif event.kind == "notice":
        world.notice()
    elif event.kind == "train":
        world.train(event.job)
    elif event.kind == "train others":
        for name in world.jobs:
            if name != event.job:
                world.train(name)
    else:
        world.early_ticks += event.kind == "early tick"
        world.tick()


def jobs_that_poll(world: World) -> list[ModelJob]:
    """Return the jobs that send requests.

    With rounds=sync, a job ends after scene.rounds rounds. With rounds=async it goes on polling, without
    pseudo-gradients.
    """
    is_rolling = world.scene.policy == "next"
    return [
        job
        for job in world.jobs.values()
        if not job.crashed and (is_rolling or job.ended < world.scene.rounds)
    ]


def faults(world: World) -> Iterator[Event]:
    """Yield the faults that can happen now."""
    crash = world.scene.crash
    if crash and not world.jobs[crash].crashed:
        yield Event("crash", crash)
    elif crash and not world.noticed:
        yield Event("notice", crash)


def events_if_still(world: World) -> Iterator[Event]:
    """Yield what can happen once no request changes anything."""
    if world.ticks >= MOST_TICKS:
        return
    jobs = [job for job in world.jobs.values() if not job.crashed]
    if world.scene.policy == "next":
        idle = [
            job.name
            for job in jobs
            if job.step == "ask" and not job.may_offer and job.ended < world.scene.rounds
        ]
        # Of many jobs, at most one trains later than the others: otherwise there are too many states.
        scene = world.scene
        are_many = scene.jobs > _MOST_TO_TRAIN_ALONE or bool(scene.crash) and scene.jobs > 3
        kind = "train others" if are_many and len(idle) == len(jobs) else "train"
        for name in idle:
            yield Event(kind, name)
        if any(job.step != "ask" or job.may_offer for job in jobs):
            yield Event("tick")
    elif any(job.ended < world.scene.rounds for job in world.honest):
        yield Event("tick")


# Partial-order reduction


class PrivateRequest(NamedTuple):
    """A request that is the only event to explore in a state."""

    job: str  # that sends it
    successor: State  # after the request


def private_request(state: State, polled: dict[str, World]) -> PrivateRequest | None:
    """Return a private request of a state; None if it has none.

    Args:
        state: The state.
        polled: Job -> the world after its next request.
    """
    if not is_reducible(state.world, polled):
        return None
    for name, following in polled.items():
        if may_be_private(state.world, following, name):
            successor = State(following, fingerprint(following))
            if is_private(state, successor, name):
                return PrivateRequest(name, successor)
    return None


def is_reducible(world: World, polled: dict[str, World]) -> bool:
    """Return whether a state may have private requests.

    It has none if the next request of a job makes the coordinator decide: the decision may be one to go on
    without a job whose request comes later.
    """
    decided = decisions(world)
    return all(decisions(following) == decided for following in polled.values())


def decisions(world: World) -> list[tuple[int, int, int, str]]:
    """Return the decisions of the coordinator about rounds that have begun."""
    rounds = world.coordinator.state.rounds.values()
    return [
        (item.number, item.attempt, item.check_number, item.outcome)
        for item in rounds
        if item.attempt or item.outcome
    ]


def may_be_private(world: World, following: World, name: str) -> bool:
    """Return whether a request that makes the coordinator decide nothing can be private.

    A private request is one of two kinds:

    1. The coordinator records a member's report on its exchange, or on what it has received. It decides
       nothing before it has the reports of all members, unless time passes or a connection is closed. And
       the order of the reports makes no difference, because no report fetches the decision that it causes:
       otherwise the job of the last report would have the reply before a timeout passes or a job crashes.
    2. A member fetches a reply: go, check, commit or void. The reply stays the same until the member has
       reported again. It changes the member's weights, so it is not private while another job takes them.

    A job may crash before or after each of its reports, and before or after the others exchange data with it.
    So the reports of that job, and all exchanges, are not private while it may crash. The requests of a slow
    job are not private while a timeout may pass before them.

    Args:
        world: A world.
        following: The world after the request.
        name: The job that sends it.
    """
    before = world.jobs[name]
    after = following.jobs[name]
    crash = world.scene.crash
    may_crash = bool(crash) and not world.jobs[crash].crashed
    may_tick_early = name in world.scene.slow and not world.early_ticks
    if before.step not in ("ask", "done", "checked") or may_tick_early:
        return False
    gives_weights = any(job.step == "take" and job.donor == name for job in world.jobs.values())
    if gives_weights and after.ended != before.ended:
        return False
    is_exchange = before.step == "done" and before.unreached is None
    if may_crash and is_exchange:
        return False
    if after.step == before.step and after.ended == before.ended:  # it waits for the reply
        return before.step != "ask" and not (may_crash and name == crash)
    return before.step != "ask" or after.step == "done"


def is_private(state: State, successor: State, name: str) -> bool:
    """Return whether a request for which may_be_private() is true changes a state, and is private."""
    if successor.mark == state.mark:
        return False
    is_report = successor.world.jobs[name].step == state.world.jobs[name].step
    is_fetched = successor.mark.coordinator == state.mark.coordinator
    return is_report or is_fetched
