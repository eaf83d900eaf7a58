"""Tests two joined jobs behind NAT, on emulated nodes: they reach the coordinator, but not each other.

Joined jobs are separate training jobs that regularly average their weights (DiLoCo). Usually they connect to
each other directly. If that is impossible, the coordinator (`holmes join serve`) relays their data. The
losses must then be the same as with direct connections. All connections use TLS.
"""

import pytest
from clusters import spec
from holmes_lab.joined import await_, coordinator, start
from holmes_lab.lab import Lab

from holmes_ext.errors import HolmesError
from integration_tests.jobs import full

CLUSTERS = spec("hub ib 1Gb/s c0", "east ib 1Gb/s a0", "west ib 1Gb/s b0", ethernet="1Gb/s")
OUTER = "min=2,every=8,fragments=2,delay=1,compress=off,timeout=60"
STEPS = 24


def train(directory, cut, *flags):
    """Train two jobs that regularly average their weights, each on another emulated node.

    Args:
        cut: Whether packets between the nodes of the two jobs are dropped. Both still reach the coordinator.
        flags: Further flags of both jobs.

    Returns:
        The losses of each job, and the lines that the coordinator printed.
    """
    directory.mkdir()
    with Lab(CLUSTERS) as lab, coordinator(lab, OUTER) as meeting:
        coordinator_lines = meeting.lines
        address_of = {node.name: node.address for node in lab.nodes}
        if cut:
            for node, other in (("a0", "b0"), ("b0", "a0")):  # in both directions
                lab.configure(node, f"route add blackhole {address_of[other]}/32")

        jobs = []
        for seed, (name, node) in enumerate((("east", "a0"), ("west", "b0")), start=1):
            job_flags = [*meeting.flags(name), *flags]
            log = directory / f"{name}.jsonl"
            environment = meeting.environment
            job = start(lab, name, [node], job_flags, STEPS, seed, log, environment=environment)
            jobs.append(job)

            # All jobs begin with the weights of the first one that joins. Wait until "east" has joined before
            # "west" starts, so that it is the same job in each run.
            message = f"job {name} is here"

            def has_joined(message=message) -> bool:
                return any(message in line for line in coordinator_lines)

            timeout_s = 120
            await_(has_joined, timeout_s, message)
        for job in jobs:
            job.wait()
        return [[step["loss"] for step in job.steps()] for job in jobs], list(coordinator_lines)


@full
def test_two_jobs_behind_nat_learn_what_they_learn_with_open_ports(tmp_path):
    direct, _ = train(tmp_path / "direct", cut=False)
    relayed, coordinator_lines = train(tmp_path / "relayed", True, "--holmes-join-ports", "none")
    rounds = sum("commit (" in line for line in coordinator_lines)
    assert rounds >= STEPS // 4 - 1, coordinator_lines
    assert relayed == direct
    assert len(direct[0]) == STEPS and direct[0][-1] < direct[0][0]


@full
def test_without_a_way_to_each_other_a_job_cannot_join(tmp_path):
    """Without the relay, a job that cannot reach the first job cannot get its weights and ends with an error.

    This shows that the network of the other test really is cut.
    """
    with pytest.raises(
        HolmesError,
        match="job (east|west) cannot join: the weights of job (east|west) could not be",
    ):
        train(tmp_path / "cut", cut=True)
