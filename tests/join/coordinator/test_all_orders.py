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


def after(world: World, event: tuple[str, str]) -> World:
    """Return the world after an event."""
    following = world.copy()
    kind, name = event
    if kind == "poll":
        following.poll(name)
    elif kind == "early tick":
        following.early_ticks += 1
        following.tick()
    else:
        {
            "crash": following.crash,
            "notice": following.notice,
            "tick": following.tick,
            "train": following.train,
        }[kind]()
    return following


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
    is_over = all(job.ended >= world.scene.rounds for job in world.honest)
    if is_still and not is_over and world.ticks < MOST_TICKS:
        has_trained = all(job.may_offer for job in world.honest)
        must_train = world.scene.policy == "next" and not has_trained
        following = after(world, ("train" if must_train else "tick", ""))
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
    if scene_is_a_dispute_of_two(world, alive):
        can_commit = False
    begin = world.coordinator.state.number
    for _ in range(ROUNDS):
        world.play(1, most_ticks=MOST_TICKS)
        if can_commit and any(number > begin for number in world.committed_together(names)):
            return
    if can_commit:
        raise Wrong(f"{names} have committed no round together after round {begin}")


def scene_is_a_dispute_of_two(world: World, alive: list[str]) -> bool:
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
    """Try one random order of events, and check the progress after each."""
    chance = random.Random(seed)
    world = World(scene)
    while True:
        worlds = next_worlds(world, world.fingerprint())
        if not worlds:
            break
        world = chance.choice(list(worlds.values()))
        if chance.random() < 0.1:
            check_progress(world)
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


@full
@pytest.mark.parametrize("jobs, name, policy", CASES)
def test_all_orders(jobs, name, policy):
    explore(scene_of(jobs, name, policy), checked_share=max(1, 4 ** (jobs - 3)))


@pytest.mark.parametrize("jobs, name, policy", [case for case in CASES if case[0] == 2])
def test_a_sample_of_the_orders_of_two_jobs(jobs, name, policy):
    assert explore(scene_of(jobs, name, policy), most_states=60) > 3


@pytest.mark.parametrize("policy", ["ready", "next"])
def test_random_orders_of_five_jobs(policy):
    for seed, name in enumerate(scenes(5)):
        walk(scene_of(5, name, policy), seed)
