"""Measures the emulated network between clusters, and how exactly `holmes probe` measures it.

    python benchmarks/links.py --json FILE [--cases NAME,...] [--repetitions 3]

The cases:

    lab          `holmes lab measure` on SITE: the largest errors of the rate for messages from 128 KiB on,
                 for a pair and for four pairs of nodes at once, and of a round trip
    delay line   CPU time of the process that delays messages between clusters, while 500 Mb/s pass, with
                 whole frames and with frames of 8 KB
    probe        `holmes probe` on 4 emulated clusters: the largest errors of the measured rates and latencies
    probe 8      seconds of `holmes probe` on 8 emulated clusters
    reduction    an all-reduce over three clusters with unequal links, as planned and in a flat ring
    never slower the same on five further networks
    placement    seconds in which holmes orders 64 nodes in eight cities
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import links_across
from harness import Row, chosen_cases, finish, parser, tell
from holmes_lab import Lab
from holmes_lab.measure import BetweenClustersRow, flood, measure
from holmes_lab.network.inter_cluster import TUNED

from holmes_ext.cluster.spec import SiteSpec, load_spec, parse_spec

#: Pair of clusters -> (rate in Mb/s, latency in one direction in ms): unequal links.
SITE = {("a", "b"): (500, 10), ("a", "c"): (200, 40), ("b", "c"): (100, 2)}
FOUR = {**SITE, ("a", "d"): (150, 20), ("b", "d"): (80, 5), ("c", "d"): (120, 80)}


LIMITED_MBPS = 500  # rate of the delayed link in the case "delay line" (a measurement of CPU time)


def cluster_toml(
    links: Mapping[tuple[str, str], tuple[float, float]],
    nodes: int,
    ethernet: str = "250Mb/s",
    uplinks: dict[str, str] | None = None,
) -> str:
    """Return the text of a cluster.toml.

    Args:
        links: Pair of clusters -> (rate in Mb/s, latency in one direction in ms).
        nodes: Nodes of each cluster.
        ethernet: Rate of the NICs.
        uplinks: Cluster -> rate of the uplink that its links share.
    """
    lines = ["version = 2", "[ethernet]", f'rate = "{ethernet}"']
    for name in dict.fromkeys(name for pair in links for name in pair):
        lines += [
            "[[cluster]]",
            f'name = "{name}"',
            'kind = "ethernet"',
            f'nodes = ["{name}[0-{nodes - 1}]"]',
        ]
        lines += [f'uplink = "{uplinks[name]}"'] if uplinks and name in uplinks else []
    for (first, second), (rate, latency) in links.items():
        lines += [
            "[[between]]",
            f'clusters = ["{first}", "{second}"]',
            f'rate = "{rate}Mb/s"',
            f'latency = "{latency}ms"',
        ]
    return "\n".join([*lines, ""])


def lab(repetitions: int) -> list[Row]:
    """Measure how exactly `holmes lab` emulates rates and round trips of links between clusters.

    There are three emulated clusters (SITE), and their links have unequal rates and latencies.
    Errors of rates are relative. The error of a round trip is in units of its tolerance: 1 ms, or 5
    % of the configured round trip if that is more.
    """
    # The links of cluster a also share an uplink. It is slower than their sum.
    spec = parse_spec(cluster_toml(SITE, nodes=4, uplinks={"a": "400Mb/s"}))
    runs = []  # rows of the links between clusters, for each repetition
    for _ in range(repetitions):
        _inside_clusters, between_clusters = measure(spec)
        runs.append(between_clusters)
    # Name in the results -> end of CrossingRow.what ("512 KiB", "1 pair", "4 pairs at once").
    endings = {
        "message from 128 KiB on": "KiB",
        "one pair": "1 pair",
        "4 pairs at once": "4 pairs at once",
    }
    rows = []
    for name, ending in endings.items():
        errors = []  # largest error of each repetition
        for run in runs:
            rates = [row for row in run if row.what.endswith(ending)]
            errors.append(max(abs(row.achieved / row.configured - 1) for row in rates))
        rows.append(
            Row.median(
                "lab",
                f"largest error, {name}",
                errors,
                unit="of the rate",
                emulated=True,
                target="<= 0.1",
            )
        )
    errors = []
    for run in runs:
        round_trips = [row for row in run if row.what == "round trip"]
        errors.append(max(map(_latency_error, round_trips)))
    rows.append(
        Row.median(
            "lab",
            "largest error of a round trip",
            errors,
            unit="of max(1 ms, 5 %)",
            emulated=True,
            target="<= 1",
        )
    )
    return rows


def _latency_error(row: BetweenClustersRow) -> float:
    """Return the error of a latency in units of its tolerance: 1 ms or 5 %, whichever is larger."""
    return abs(row.achieved - row.configured) / max(1e-3, 0.05 * row.configured)


def delay_line(repetitions: int) -> list[Row]:
    """Measure the CPU time of the process that delays messages between emulated clusters.

    It is called delay line. A node of cluster a, or two, send as fast as they can to cluster b over
    a link of 500 Mb/s and 10 ms. The results are the share of a core that the delay line uses, and
    the rate that is reached.
    """
    rows = []
    for nodes, ethernet, target in ((1, "2Gb/s", "<= 0.1"), (2, "250Mb/s", "")):
        name = f"NICs of {ethernet}: {nodes}"
        spec = parse_spec(cluster_toml({("a", "b"): (LIMITED_MBPS, 10)}, nodes, ethernet))
        shares = []  # of a core, used by the delay line
        rates = []  # in bits/s
        with Lab(spec, realtime=True, sysctl=TUNED) as emulated:
            sides = [
                [node for node in emulated.nodes if node.ethernet_segment == number]
                for number in (0, 1)
            ]
            for _ in range(repetitions):
                cpu_before = _cpu_s(emulated.delay_line)
                sent_before = _sent(emulated)
                # flood() sends from `nodes` nodes at once. Its value "flood" is a sender's rate in
                # bits/s. sizes: of further single messages to time; none are needed here.
                senders = flood(emulated, sides, count=nodes, sizes=[])
                rates.append(sum(sender["flood"] for sender in senders))
                sent_bits = 8 * (_sent(emulated) - sent_before)
                busy_s = sent_bits / (LIMITED_MBPS * 1e6)  # while the link carried data
                shares.append((_cpu_s(emulated.delay_line) - cpu_before) / busy_s)
        rows.append(
            Row.median(
                "delay line", f"CPU, {name}", shares, unit="cores", emulated=True, target=target
            )
        )
        rows.append(
            Row.median(
                "delay line",
                f"rate, {name}",
                [rate / 1e6 for rate in rates],
                unit="Mb/s",
                emulated=True,
            )
        )
    return rows


def _cpu_s(pid: int | None) -> float:
    """Return the CPU seconds that a process has used.

    Args:
        pid: The process. None if the lab has no delay line. That cannot be in this benchmark: the
            file of such a process does not exist, and reading it fails.
    """
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def _sent(emulated: Lab) -> int:
    """Return the bytes that the nodes of cluster a have sent."""
    return sum(
        nics["eth0"][1] for node, nics in emulated.counters().items() if node.startswith("a")
    )


def probe(repetitions: int) -> list[Row]:
    """Measure how exactly `holmes probe` finds rates and latencies between 4 clusters.

    The probe measures a round trip, and half of it is the latency in its cluster file. Their
    relative errors are the same, and the row is named after the measured round trip.
    """
    rate_errors, latency_errors = [], []  # relative
    for _ in range(repetitions):
        spec, _ = _probe(cluster_toml(FOUR, nodes=2))  # with NICs of 250 Mb/s
        pairs = {frozenset(pair.clusters): pair for pair in spec.pairs}
        for (first, second), (rate_mbps, latency_ms) in FOUR.items():
            link = pairs[frozenset((first, second))]
            # Two nodes of 250 Mb/s in a cluster cannot send faster than 500 Mb/s.
            possible_bps = min(rate_mbps * 1e6, 2 * 250e6)
            rate_errors.append(abs(link.rate_bps / possible_bps - 1))
            latency_errors.append(abs(link.latency_s / (latency_ms * 1e-3) - 1))
    worst = (("rate", rate_errors), ("round trip", latency_errors))
    return [
        Row.of(
            "probe",
            f"largest error of a {name}, 4 clusters",
            max(errors),
            unit="of the configured",
            spread=(min(errors), max(errors)),
            emulated=True,
            target="<= 0.1",
        )
        for name, errors in worst
    ]


def probe_eight(repetitions: int) -> list[Row]:
    """Measure how long `holmes probe` takes on 8 clusters.

    Their 28 links have 100 Mb/s and latencies of 2 to 69.5 ms: a probe takes longer over long
    links.
    """
    links = {}
    for number, pair in enumerate(itertools.combinations("abcdefgh", 2)):
        rate_mbps, latency_ms = 100, 2 + 2.5 * number
        links[pair] = rate_mbps, latency_ms
    text = cluster_toml(links, nodes=2, ethernet="100Mb/s")
    seconds = []
    for _ in range(repetitions):
        _, probe_s = _probe(text)
        seconds.append(probe_s)
    return [
        Row.median(
            "probe 8",
            "8 clusters, 28 links, start included",
            seconds,
            unit="s",
            emulated=True,
            target="<= 120",
        )
    ]


def _probe(text: str) -> tuple[SiteSpec, float]:
    """Run `holmes probe` on emulated clusters, and return the networks that it measured.

    The nodes are network namespaces of this machine. Their links have the given rates and
    latencies.

    Args:
        text: The cluster.toml of the emulated clusters.

    Returns:
        (the clusters with measured rates and latencies, the seconds that the probe took).
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "cluster.toml")
        file.write_text(text)
        # TUNED: settings of the kernel's TCP. With them, long links reach their rate.
        with Lab(load_spec(file), realtime=True, sysctl=TUNED) as emulated:
            # --largest 0.25: messages of up to 0.25 MiB, instead of 16, since the links are slow.
            words = ["probe", "--cluster", str(file), "--largest", "0.25"]
            command = [sys.executable, "-m", "holmes_ext.cli.main", *words]
            begin = time.monotonic()
            # torch is imported once, and the ranks are forked from that process.
            result = emulated.run(command, preload=("torch",), timeout=400)
            seconds = time.monotonic() - begin
        if result.returncode:
            rank = result.first_failed or 0  # None, e.g. after a time-out: show rank 0
            raise SystemExit(result.outputs[rank])
        tell(f"probed in {seconds:.0f} s")
        return load_spec(file), seconds


CASES = {
    "lab": lab,
    "delay line": delay_line,
    "probe": probe,
    "probe 8": probe_eight,
    **links_across.CASES,
}


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    args = arguments.parse_args()

    def rows() -> Iterator[Row]:
        for name in chosen_cases(args.cases, CASES):
            tell(f"{name} ...")
            yield from CASES[name](args.repetitions)

    return finish(list(rows()), args.json, "The network between clusters")


if __name__ == "__main__":
    sys.exit(main())
