"""Tests two joined jobs whose link is cut and comes back, on emulated nodes.

Both jobs must continue alone, and then together.
"""

import re

from holmes_lab.joined import CLUSTERS, NODES, await_, coordinator, start
from holmes_lab.lab import Lab

from holmes_ext.cluster.spec import parse_spec
from integration_tests.jobs import full

OUTER = "every=8,fragments=4,delay=1,timeout=5"


@full
def test_a_cut_link_comes_back(tmp_path):
    with Lab(parse_spec(CLUSTERS, "cluster.toml")) as lab, coordinator(lab, OUTER) as meeting:
        events = meeting.lines
        jobs = {
            name: start(
                lab,
                name,
                nodes,
                meeting.flags(name),
                400,
                seed,
                tmp_path / f"{name}.jsonl",
                environment=meeting.environment,
            )
            for seed, (name, nodes) in enumerate(NODES.items(), 1)
        }

        def shared_rounds():
            pattern = r"commit \(.*east.*west|commit \(.*west.*east"
            return sum(bool(re.search(pattern, line)) for line in events)

        await_(lambda: shared_rounds() >= 3, 200, "rounds of both")
        for node in NODES["west"]:
            lab.set_silent(node, "eth0", True)
        before = {name: len(job.steps()) for name, job in jobs.items()}
        for name, job in jobs.items():
            await_(
                lambda job=job, name=name: len(job.steps()) >= before[name] + 15,
                100,
                f"{name}'s going on alone",
            )
        before_repair = shared_rounds()
        for node in NODES["west"]:
            lab.set_silent(node, "eth0", False)
        await_(lambda: shared_rounds() >= before_repair + 3, 100, "rounds of both again")
        for job in jobs.values():
            job.job.kill()
    assert any("job west is gone" in line or "without job west" in line for line in events), events
