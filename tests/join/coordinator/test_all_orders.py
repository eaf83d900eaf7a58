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

import random
from collections.abc import Iterator

import pytest
from joined_model import LIES, NAMES, Scene, World, Wrong

from holmes_ext.join.coordinator import settlement
from holmes_ext.join.coordinator.settlement import Settlement
from tests.selection import full

ROUNDS = 8
#: Timeouts of a round, and of an explored order of events: later states are not explored further.
MOST_TICKS = 6


def events_of(world: World) -> Iterator[tuple[str, str]]:
    """Yield the events that can happen next, except that time passes."""
    for name, job in world.jobs.items():
        if not job.crashed and job.ended < world.scene.rounds:
            yield "poll", name
    crash = world.scene.crash
    if crash and not world.jobs[crash].crashed:
        yield "crash", crash
    elif crash and not world.noticed:
        yield "notice", crash
    if world.scene.slow and not world.early_ticks:
        yield "early tick", ""


def perform(world: World, event: tuple[str, str]) -> None:
    """Let an event happen."""
    kind, name = event
    if kind == "poll":
        world.poll(name)
    elif kind == "early tick":
        world.early_ticks += 1
        world.tick()
    else:
        {"crash": world.crash, "notice": world.notice, "tick": world.tick, "train": world.train}[
            kind
        ]()


def after(world: World, event: tuple[str, str]) -> World:
    """Return the world after an event."""
    following = world.copy()
    perform(following, event)
    return following


def event_if_all_wait(world: World) -> tuple[str, str] | None:
    """Return what happens once no job can do anything: training goes on, or time passes."""
    if all(job.ended >= world.scene.rounds for job in world.honest) or world.ticks >= MOST_TICKS:
        return None
    has_trained = all(job.may_offer for job in world.honest)
    if world.scene.policy == "next" and not has_trained:
        return "train", ""
    return "tick", ""


def next_worlds(world: World, mark: bytes) -> dict[bytes, World]:
    """Return the worlds after each possible event; time passes only if no job can do anything.

    Args:
        world: A world.
        mark: Its fingerprint.

    Returns:
        Fingerprint -> world.
    """
    worlds = {}
    is_still = True
    for event in events_of(world):
        following = after(world, event)
        following_mark = following.fingerprint()
        if following_mark != mark:
            worlds[following_mark] = following
            is_still = is_still and event[0] != "poll"
    last_event = event_if_all_wait(world)
    if is_still and last_event is not None:
        following = after(world, last_event)
        worlds[following.fingerprint()] = following
    return worlds


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


def explore(scene: Scene, most_states: int = 10**6, checked_share: int = 1) -> int:
    """Explore all orders of events of a scene; return the number of states.

    Args:
        scene: Jobs and faults.
        most_states: States after which the exploration ends.
        checked_share: Progress is checked from one of so many states.
    """
    start = World(scene)
    unexplored = [(start.fingerprint(), start)]
    seen = {mark for mark, _ in unexplored}
    while unexplored and len(seen) < most_states:
        mark, world = unexplored.pop()
        if mark[0] % checked_share == 0:
            check_progress(world)
        for following_mark, following in next_worlds(world, mark).items():
            if following_mark not in seen:
                seen.add(following_mark)
                unexplored.append((following_mark, following))
    return len(seen)


def walk(scene: Scene, seed: int) -> None:
    """Try one random order of events, and check the progress at its end."""
    chance = random.Random(seed)
    world = World(scene)
    event: tuple[str, str] | None = ("tick", "")
    while event is not None:
        before = world.fingerprint()
        events = list(events_of(world))
        chance.shuffle(events)
        for event in events:
            perform(world, event)
        if world.fingerprint() == before:
            event = event_if_all_wait(world)
            if event is not None:
                perform(world, event)
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
    scene = scenes(jobs)[name]
    rounds = 1 if jobs > 3 else scene.rounds
    return Scene(**{**scene.__dict__, "policy": policy, "rounds": rounds})


@full(share=1000)  # nightly: each case takes seconds, and the random orders below run each time
@pytest.mark.parametrize("jobs, name, policy", CASES)
def test_all_orders(jobs, name, policy):
    """Explore a scene completely; of the few that have more than 30,000 states, so many of them."""
    scene = scene_of(jobs, name, policy)
    explore(scene, most_states=30_000, checked_share=max(1, 4 ** (jobs - 3)))


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
