"""Measures `holmes weights` in the lab, beside rsync, S3 and a broadcast: a trainer and sites of 3 hosts.

    python benchmarks/weights.py --json results/weights.json --models FOLDER --rsync FILE --moto FILE
        [--repetitions 3] [--runs FILE] [--minutes 0]

Each repetition runs all ways one after the other, and every other one in the reverse order.
The sites' links and the trainer's uplink, which all sites share, have the same rate. A time counts from the
publication of a version until the last host has staged it. The bound is the bytes of all sites over the rate
of the uplink.

Versions are checkpoints and deltas of a model (weights_model.py). FOLDER keeps them. --rsync names rsync's
program, --moto a Python with moto[server]; what is not named is left out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import weights_beside
import weights_others
from harness import Row, Runs, chosen_cases, finish, parser, tell
from holmes_lab import Lab
from holmes_lab.cores import core_times
from holmes_lab.network.inter_cluster import TUNED
from weights_lab import LabCores, Network, WeightsHosts, sent_bytes
from weights_model import ModelVersion, versions_of

from holmes_ext.cluster.spec import load_spec

NETWORKS = {
    network.name: network
    for rate_bps in (1e8, 1e9)
    for latency_ms in (20, 80)
    for network in (Network(sites, rate_bps, latency_ms) for sites in (1, 2, 4, 8))
}
#: Rate of the links -> width and layers of the model: 21 and 201 million parameters.
MODELS = {1e8: (512, 5), 1e9: (1024, 12)}
VERSIONS = "full delta delta full"
#: Rate above which all programs of this machine count, not only those of the lab.
_MANY_PACKETS_BPS = 5e8
#: Name of the way that is compared with all others.
HOLMES = "holmes"
#: Case with a training job beside a transfer.
BESIDE = "training beside"


def measure_holmes(network: Network, versions: list[ModelVersion]) -> dict[str, Any]:
    """Send versions of a model to all hosts with `holmes weights`, and return the measurements.

    Args:
        network: The emulated network, with the trainer's host and the hosts of the sites.
        versions: Versions to publish, one after the other.

    Returns:
        For each version: "seconds" until the last host has it, "wan_bytes" that the trainer has sent, and
        the load of this machine's cores, from 0 to 1: "busy" by the lab's programs, "busy_in_all" by all
        programs. "copies": how often the trainer has sent the bytes of all versions.
    """
    results: dict[str, Any] = {"seconds": [], "wan_bytes": [], "busy": [], "busy_in_all": []}

    def run(lab: Lab, folder: Path) -> None:
        hosts = WeightsHosts(lab, network, folder)
        try:
            hosts.start()
            for number, version in enumerate(versions, start=1):
                cores, machine = LabCores(), core_times()
                sent = sent_bytes(lab)
                seconds = hosts.publish(version.folder, number, version.parent)
                results["seconds"].append(seconds)
                results["busy"].append(cores.busy())
                results["busy_in_all"].append(core_times().busy_since(machine))
                results["wan_bytes"].append(sent_bytes(lab) - sent)
            results["copies"] = max(hosts.status()["sent_bytes"].values()) / sum(
                version.size for version in versions
            )
        finally:
            hosts.close()

    in_lab(network, run)
    return results


def measure_other(network: Network, copy: Callable[[Lab, Path], Any]) -> dict[str, Any]:
    """Copy a folder to all hosts in another way than `holmes weights`, and return the measurements.

    Args:
        network: The emulated network.
        copy: Copies the folder, called with the lab and a folder for the copies; returns a Copied.

    Returns:
        "seconds" until the last host has the folder, "wan_bytes" that the trainer has sent, and "busy": the
        load of this machine's cores by the lab's programs, from 0 to 1.
    """
    results: dict[str, Any] = {}

    def run(lab: Lab, folder: Path) -> None:
        cores = LabCores()
        copied = copy(lab, folder / "copied")
        busy = cores.busy()
        results.update(seconds=copied.seconds, wan_bytes=copied.bytes, busy=busy)

    in_lab(network, run)
    return results


def measure_beside() -> dict[str, Any]:
    """Run weights_beside.measure() in a lab: a transfer of weights beside a training job."""
    result: dict[str, Any] = {}

    def run(lab: Lab, folder: Path) -> None:
        result.update(weights_beside.measure(lab, folder))

    in_lab(weights_beside.NETWORK, run)
    return result


def in_lab(network: Network, run: Callable[[Lab, Path], None]) -> None:
    """Emulate a network in a lab, and call `run` with the lab and a temporary folder."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "cluster.toml").write_text(network.toml())
        # TUNED: settings of the kernel's TCP with which long links reach their rate.
        spec = load_spec(folder / "cluster.toml")
        with Lab(spec, realtime=True, sysctl=TUNED) as lab:
            run(lab, folder)


def ways_of(
    args: Any, network: Network, versions: list[ModelVersion]
) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a function for each way to copy versions (holmes, rsync, S3, a broadcast) that measures it once.

    Args:
        args: Options of this program; rsync and S3 need a path in them.
        network: The emulated network.
        versions: Versions that holmes sends one after the other. The other ways send the first.

    Returns:
        Name of the way -> the function.
    """
    source = versions[0]
    others: dict[str, Callable[..., Any]] = {}
    if args.rsync:
        others["rsync"] = lambda lab, folder: weights_others.rsync(
            lab, network, source.folder, folder, args.rsync
        )
    if args.moto:
        others["S3"] = lambda lab, folder: weights_others.s3(
            lab, network, source.folder, folder, args.moto
        )
    others["broadcast"] = lambda lab, folder: weights_others.broadcast(lab, network, source.size)
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        HOLMES: partial(measure_holmes, network, versions)
    }
    for name, copy in others.items():
        ways[name] = partial(measure_other, network, copy)
    return ways


def repeat(
    case: str, ways: dict[str, Callable[[], dict[str, Any]]], repetitions: int, runs: Runs
) -> list[dict[str, dict[str, Any]]]:
    """Measure all ways several times; return for each repetition the name of a way -> its result.

    Args:
        case: Name of the case.
        ways: Name of a way -> function that measures it once.
        repetitions: Runs of each way.
        runs: Results of earlier runs, and the limit of time.
    """
    results = []
    for repetition in range(1, repetitions + 1):
        result = {}
        names = list(ways)
        if repetition % 2 == 0:
            names.reverse()
        for name in names:
            run = runs.of(f"{case}: {name} {repetition}", ways[name])
            if run is not None:
                result[name] = run
        results.append(result)
    return results


def rows_of(
    network: Network,
    versions: list[ModelVersion],
    results: list[dict[str, dict[str, Any]]],
) -> list[Row]:
    """Return the rows of one network.

    Args:
        network: The network.
        versions: The versions.
        results: Results of repeat(): of measure_holmes() and of measure_other().
    """
    holmes = [result[HOLMES] for result in results if HOLMES in result]
    numbers = range(len(versions))
    full = [number for number in numbers if versions[number].parent is None]
    deltas = [number for number in numbers if versions[number].parent is not None]
    size = versions[full[0]].size
    # Many packets keep the kernel busy, whose threads have to share the cores with all other programs.
    meter = "busy_in_all" if network.rate_bps > _MANY_PACKETS_BPS else "busy"
    busy = max(max(run[meter]) for run in holmes)
    # TCP's windows of the first version are still small.
    first_s: list[float] = []  # of the first checkpoint
    seconds: list[float] = []  # of all later checkpoints
    delta_s: list[float] = []
    bytes_to_site: list[float] = []  # of each checkpoint, that the trainer sent to a site
    for run in holmes:
        first_s.append(run["seconds"][full[0]])
        seconds += [run["seconds"][number] for number in full[1:]]
        delta_s += [run["seconds"][number] for number in deltas]
        bytes_to_site += [run["wan_bytes"][number] / network.sites for number in full]
    bound_s = network.bound_s(size)

    def row(
        metric: str, values: list[float], unit: str, target: str = "", is_time: bool = True
    ) -> Row:
        load = busy if is_time else None  # bytes are the same on a busy machine
        return Row.median(
            network.name, metric, values, unit, emulated=False, target=target, busy=load
        )

    rows = [
        row("checkpoint, bound", [bound_s], "s"),
        row("checkpoint, holmes", seconds, "s"),
        row("checkpoint / bound", [each / bound_s for each in seconds], "x", "<= 1.1"),
        row("first checkpoint / bound", [each / bound_s for each in first_s], "x", "<= 1.1"),
        row("copies sent to a site", [run["copies"] for run in holmes], "x", "<= 1", is_time=False),
        row(
            "uplink's bytes / copies, holmes",
            [each / size for each in bytes_to_site],
            "x",
            is_time=False,
        ),
        row("delta, bound", [network.bound_s(versions[deltas[0]].size)], "s"),
        row("delta, holmes", delta_s, "s"),
    ]
    for name in dict.fromkeys(name for result in results for name in result if name != HOLMES):
        pairs = [result for result in results if HOLMES in result and name in result]
        if not pairs:
            continue
        other_s = [pair[name]["seconds"] for pair in pairs]
        # The slower checkpoint of the same repetition.
        holmes_s = [max(pair[HOLMES]["seconds"][number] for number in full) for pair in pairs]
        ratios = [ours / theirs for ours, theirs in zip(holmes_s, other_s, strict=True)]
        other_bytes = [pair[name]["wan_bytes"] / network.sites / size for pair in pairs]
        rows += [
            row(f"checkpoint, {name}", other_s, "s"),
            row(f"holmes : {name}", ratios, "x", "<= 1"),
            row(f"uplink's bytes / copies, {name}", other_bytes, "x", is_time=False),
        ]
    return rows


def rows_beside(result: dict[str, Any]) -> list[Row]:
    """Return rows of results: how much a transfer of weights slows a training job on the same link.

    Args:
        result: Result of weights_beside.measure().
    """
    slower = weights_beside.slower_percent(result)
    return [
        Row.median(BESIDE, "alone", result["alone"], unit="steps/s", emulated=True),
        Row.median(BESIDE, "beside", result["beside"], unit="steps/s", emulated=True),
        Row.median(BESIDE, "slower", slower, unit="%", emulated=True, target="<= 1"),
        Row.median(BESIDE, "share of the link", result["shares"], unit="x", emulated=True),
        _rate_row("training while it exchanges a round", result["training"]),
        _rate_row("weights meanwhile", result["weights_beside"]),
        _rate_row("weights otherwise", result["weights_otherwise"]),
    ]


def _rate_row(metric: str, values: list[float]) -> Row:
    return Row.median(BESIDE, metric, values, unit="Mb/s", emulated=True)


def main() -> int:
    """Measure the chosen networks, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--models", type=Path, required=True, help="folder for checkpoints")
    arguments.add_argument("--rsync", type=Path, metavar="FILE", help="program rsync")
    arguments.add_argument("--moto", type=Path, metavar="FILE", help="Python with moto[server]")
    arguments.add_argument(
        "--repetitions", type=int, default=3, help="runs of each way (default: 3)"
    )
    Runs.add_arguments(arguments)
    args = arguments.parse_args()
    runs = Runs(args.runs, args.minutes)
    rows: list[Row] = []
    for name in chosen_cases(args.cases, (*NETWORKS, BESIDE)):
        if name == BESIDE:
            result = runs.of(BESIDE, measure_beside)
            rows += rows_beside(result) if result is not None else []
            continue
        network = NETWORKS[name]
        width, layers = MODELS[network.rate_bps]
        versions = versions_of(args.models / f"{width}x{layers}", width, layers, VERSIONS)
        results = repeat(name, ways_of(args, network, versions), args.repetitions, runs)
        if any(HOLMES in result for result in results):
            rows += rows_of(network, versions, results)
        tell(f"load average {os.getloadavg()[0]:.1f}")
    return finish(rows, args.json, "weights to sites over emulated links")


if __name__ == "__main__":
    raise SystemExit(main())
