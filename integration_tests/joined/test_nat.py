"""Two jobs that no one can call, as behind NAT, in the lab: they reach `holmes join serve` and not each
other, and learn what they learn with open ports. TLS throughout."""

import pytest
from clusters import spec

from holmes_ext.errors import HolmesError
from holmes_ext.lab.joined import await_, coordinator, join_flags, start
from holmes_ext.lab.lab import Lab
from integration_tests.jobs import full

CLUSTERS = spec("hub ib 1Gb/s c0", "east ib 1Gb/s a0", "west ib 1Gb/s b0", ethernet="1Gb/s")
OUTER = "min=2,every=8,fragments=2,delay=1,compress=off,timeout=60"
STEPS = 24


def train(directory, cut, *flags):
    """Train two joined jobs; return the losses of each, and the lines that the coordinator printed.

    Args:
        cut: Whether the two jobs' nodes cannot reach each other.
        flags: Further flags of both jobs.
    """
    directory.mkdir()
    with Lab(CLUSTERS) as lab, coordinator(lab) as (where, told):
        if cut:
            for node, other in (("a0", "b0"), ("b0", "a0")):
                address = next(one.address for one in lab.nodes if one.name == other)
                lab.configure(node, f"route add blackhole {address}/32")
        jobs = []
        for seed, (name, node) in enumerate((("east", "a0"), ("west", "b0")), 1):
            job_flags = [*join_flags(name, where, OUTER), *flags]
            jobs.append(start(lab, name, [node], job_flags, STEPS, seed, directory / f"{name}.jsonl"))
            # All jobs begin with the weights of the first one that joins. Wait for it, so that it is the same
            # job in each run.
            message = f"job {name} is here"
            await_(lambda message=message: any(message in line for line in told), 120, message)
        for job in jobs:
            job.wait()
        return [[step["loss"] for step in job.steps()] for job in jobs], list(told)


@full
def test_two_jobs_behind_nat_learn_what_they_learn_with_open_ports(tmp_path):
    direct, _ = train(tmp_path / "direct", False)
    relayed, told = train(tmp_path / "relayed", True, "--holmes-join-ports", "none")
    assert sum("commit (" in line for line in told) >= STEPS // 4 - 1, told
    assert relayed == direct
    assert len(direct[0]) == STEPS and direct[0][-1] < direct[0][0]


@full
def test_without_a_way_to_each_other_a_job_cannot_join(tmp_path):
    """That the network of the test above is cut at all: with ports that are told, the second job cannot have
    the first one's weights, and says so in one line."""
    with pytest.raises(HolmesError, match="job (east|west) cannot join: the weights of job (east|west) could "
                                          "not be"):
        train(tmp_path / "cut", True)
