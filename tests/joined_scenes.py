"""Faults of joined jobs whose orders of events are explored, and the property that must hold.

identical data    jobs that commit a round apply the same data to the same weights, and each pseudo-gradient
                  is applied once (World checks both)
progress          if nothing else goes wrong from now on, and all jobs poll in turn, then the jobs that can
                  exchange commit a round together within ROUNDS rounds
no endless wait   no round takes more than MOST_TICKS timeouts
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from joined_explorer import MOST_TICKS
from joined_model import LIES, NAMES, Scene, World, Wrong

from tests.selection import full

ROUNDS = 8
#: Jobs -> rounds that each job makes in an explored order of events.
ROUNDS_OF_JOBS = {2: 2, 3: 2, 4: 1, 5: 1}
#: Jobs -> one of how many cases runs each time; nightly, all of them do.
SHARE_OF_JOBS = {2: 10, 3: 60, 4: 400, 5: 1000}


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
    if jobs > 2:
        del found["slow jobs"]
    # A slow job must take weights from one that it reaches over the relay only.
    if jobs < 4:
        found["a cut pair, a slow first job"] = Scene(jobs, cut=names[:2], slow=names[:1])
    for faults_of_scene in itertools.product(cuts.items(), crashes.items(), liars.items()):
        name = ", ".join(fault for fault, _ in faults_of_scene if fault) or "no fault"
        keywords = dict(item for _, fields in faults_of_scene for item in fields.items())
        found[name] = Scene(jobs, **keywords)
    return found


def scene_of(jobs: int, name: str, policy: str) -> Scene:
    return replace(scenes(jobs)[name], policy=policy, rounds=ROUNDS_OF_JOBS[jobs])


CASES = [
    (jobs, name, policy)
    for jobs in SHARE_OF_JOBS
    for name in scenes(jobs)
    for policy in ("ready", "next")
]
MARKED_CASES = [pytest.param(*case, marks=full(share=SHARE_OF_JOBS[case[0]])) for case in CASES]


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
    can_commit = size > 0 and len(alive) <= 2 * size and not is_dispute_of_two(world, alive)
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
