"""Tests four joined jobs of which two cannot reach each other, on emulated nodes with TLS.

All jobs reach the coordinator (`holmes join serve`) and listen on ports of their own; only packets between
the nodes of `east` and `west` are dropped. The two must then use the relay of the coordinator: `west` to take
the weights of `east` when it joins, and both to exchange pseudo-gradients. So all four jobs take part in
every round.
"""

from clusters import spec
from holmes_lab.joined import await_, coordinator, start
from holmes_lab.lab import Lab

from integration_tests.jobs import full

CLUSTERS = spec(
    "hub ib 1Gb/s c0",
    "east ib 1Gb/s a0",
    "west ib 1Gb/s b0",
    "north ib 1Gb/s d0",
    "south ib 1Gb/s e0",
    ethernet="1Gb/s",
)
NODES = {"east": "a0", "west": "b0", "north": "d0", "south": "e0"}
#: Rounds 1 and 2 may take place before all four jobs have joined.
OUTER = "min=4,every=8,fragments=2,delay=1,compress=off"
OWN = "timeout=20"  # setting of each job
STEPS = 40


@full
def test_a_cut_pair_of_four_jobs_uses_the_relay_and_all_keep_their_rounds(tmp_path):
    with Lab(CLUSTERS) as lab, coordinator(lab, OUTER) as running:
        lines = running.lines
        address_of = {node.name: node.address for node in lab.nodes}
        for node, other in (("a0", "b0"), ("b0", "a0")):  # in both directions
            lab.configure(node, f"route add blackhole {address_of[other]}/32")
        jobs = []
        # The first job gives its weights to the others; west must take them over the relay.
        for seed, name in enumerate(("east", "west", "north", "south"), start=1):
            log = tmp_path / f"{name}.jsonl"
            jobs.append(
                start(
                    lab,
                    name,
                    [NODES[name]],
                    running.flags(name, OWN),
                    STEPS,
                    seed,
                    log,
                    environment=running.environment,
                )
            )

            def has_joined(message=f"job {name} is here") -> bool:
                return any(message in line for line in lines)

            await_(has_joined, 120, f"job {name}")
        for job in jobs:
            job.wait()
    assert any(
        "jobs east, west could not exchange, and now use the relay" in line for line in lines
    )
    commits = [line for line in lines if ": commit (" in line]
    together = [line for line in commits if all(name in line for name in NODES)]
    rounds = STEPS // 4
    assert len(together) >= 0.9 * rounds, lines
