"""Measures the gain of overlapped and hierarchical gradient reductions in emulated clusters of 4 + 4 nodes.

    python benchmarks/reduction.py [--json FILE]
                                   [--cases overlap,pipeline,pipeline 8,ring,owners,step,gather,gather 6]
                                   [--repetitions N]

The cases:

    overlap    Plain torch on the 4 nodes of one cluster: the seconds for which finish() waits, with and
               without overlap.
    pipeline   DeepSpeed on 8 nodes, pipeline 2 x data 4: stock, holmes without and with overlap, and
               all-RDMA without and with overlap. There are 6 micro-batches, and 8 in "pipeline 8".
    ring       An all-reduce on 8 nodes without training: a flat ring over Ethernet, and hierarchical. The
               bytes are those of the NICs' counters.
    owners     10 MiB of gradients under ZeRO 1 on 4 nodes, and on 2, over Ethernet: an all-reduce, and
               chains to the ranks that need each part.
    step       Plain torch on 8 nodes, data 8 over both clusters, with overlap: a flat ring, and hierarchical.
    gather     The distributed optimizer of megatron-core on 8 nodes, pipeline 2 x data 4: updated weights
               are gathered after the step, or during the next forward pass. There are 2 micro-batches, and
               6 in "gather 6".

Nodes are network namespaces, and their links have limited rates. Layers sleep as long as an emulated GPU
would compute; in "ring" and "owners" nothing is computed. In "overlap", "pipeline", "step" and "gather",
networks and GPUs are slower than in the sample cluster by the same factor. Proportions stay the same, and
the two CPU cores of this machine, which run eight nodes, their NICs and the switch, have enough time. The
program needs root (or user namespaces) and iproute2.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from harness import Row, chosen_cases, finish, parser, tell
from holmes_lab import Lab, interleave
from holmes_lab.compare import Series, Variant, all_rdma, compare, max_loss_difference
from links_across import join_group, time_sums
from megatron_two_clusters import PRELOAD as MEGATRON

from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.samples import examples

CLUSTERS = examples() / "clusters" / "two_clusters_8.toml"
#: Case -> factor of the slow-down of its networks (relative to the sample cluster file) and of its emulated
#: GPUs (relative to the FLOP/s below). The ratio of communication to compute stays the same. The CPU work of
#: eight nodes on the two cores of this machine becomes a smaller part of a step.
SLOWER = {"overlap": 2, "pipeline": 4, "step": 4, "gather": 4}
#: 3.1 M parameters, 6.2 MB of gradients in each of two stages. At 3e9 FLOP/s a stage computes 16 ms forward,
#: 32 ms backward (SLOWER times as long), and its reduction takes 37 ms on InfiniBand, 46 on RoCE, 0.3 s on
#: Ethernet. With 6 micro-batches stock on the hybrid clusters has 0.6 of the all-RDMA speed, as in
#: two_clusters.py's 4+4 and in the prototype that the targets come from; with 8 the reduction is a smaller
#: part of the step.
PIPELINE = "--stages 2 --layers 6 --hidden 204 --heads 4 --sequence 16 --micro-batch 1".split()
MICRO_BATCHES = {"pipeline": 6, "pipeline 8": 8}
#: FLOP/s of an emulated GPU in the case "overlap": the last backward pass takes longer than the
#: reduction.
OVERLAP_FLOPS = 4e8
#: The same in the case "step".
STEP_FLOPS = 8e8
#: 10.7 MB of gradients; at 8e8 FLOP/s 0.63 s of computing a step, of which 0.21 s are the last backward; a
#: flat ring takes 0.6 s.
PLAIN = "--layers 6 --hidden 192 --heads 4 --sequence 16 --micro-batch 1 --micro-batches 2".split()
RING_BYTES = 10 * 2**20
#: megatron-core's distributed optimizer: 8 MB of weights in each of two stages, on 4 nodes each.
GATHER = (
    "--pipeline 2 --layers 6 --hidden 256 --heads 4 --sequence 16 --micro-batch 1 "
    "--distributed-optimizer".split()
)
GATHER_MICRO_BATCHES = {"gather": 2, "gather 6": 6}


@contextmanager
def slower_clusters(case: str) -> Iterator[tuple[Path, SiteSpec]]:
    """Write a cluster file with slower networks, and yield its path and its content.

    All rates of the sample file two_clusters_8.toml (CLUSTERS) are divided by SLOWER[case].
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "clusters.toml")

        def slower_rate(match: re.Match[str]) -> str:
            return f'rate = "{float(match[1]) / SLOWER[case]:g}'

        file.write_text(re.sub(r'rate = "([0-9.]+)', slower_rate, CLUSTERS.read_text()))
        yield file, load_spec(file)


def overlap(repetitions: int) -> list[Row]:
    """Measure how long a job waits for a reduction that takes less than the last backward pass.

    Four nodes of one cluster train examples/plain_torch with and without overlap. Networks and GPUs
    are SLOWER["overlap"] times slower than in the sample cluster, so that the CPU work of this
    machine counts less. Results are the exposed seconds of a step (a rank only waits for its reduction), and
    the seconds of the reduction.
    """
    rows, exposed, reductions = [], {}, {}
    with slower_clusters("overlap") as (_, spec), Lab(spec, realtime=True) as lab:
        nodes = spec.clusters[0].nodes
        for _ in range(repetitions):
            for name, flags in (("after the backward", ["--no-overlap"]), ("overlapped", [])):
                records = run_plain_torch(
                    lab, nodes, [*flags, "--holmes"], flops=OVERLAP_FLOPS / SLOWER["overlap"]
                )
                # Exposed seconds of a step (the rank only waits for its reduction), and the seconds from the
                # first bucket's start to the last bucket's end.
                exposed.setdefault(name, []).append(
                    statistics.median(record["exposed_s"] for record in records)
                )
                reductions.setdefault(name, []).append(
                    statistics.median(record["reduction_s"] for record in records)
                )
    for name in exposed:
        rows.append(_row("overlap", f"exposed reduction, {name}", exposed[name], "s"))
        rows.append(_row("overlap", f"first launch to last bucket, {name}", reductions[name], "s"))
    ratios = [a / b for a, b in zip(exposed["overlapped"], exposed["after the backward"])]
    rows.append(
        _row("overlap", "exposed time, overlapped / after the backward", ratios, "x", "<= 0.25")
    )
    return rows


def step(repetitions: int) -> list[Row]:
    """Compare a flat ring with a hierarchical all-reduce in a data-parallel job over both clusters.

    The job is examples/plain_torch. Networks and GPUs are SLOWER["step"] times slower than in the
    sample cluster, so that the CPU work of this machine counts less. Results are the seconds of a step, the
    exposed seconds (a rank only waits for its reduction), and the losses.
    """
    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    exposed: dict[str, list[float]] = {}
    with slower_clusters("step") as (file, spec), Lab(spec, realtime=True) as lab:
        for _ in range(repetitions):
            hierarchical = ["--holmes", "--holmes-cluster", str(file)]
            for name, flags in (
                # Without holmes, all 10.7 MB would be one bucket (of 25 MiB), and nothing would
                # overlap.
                ("flat ring", ["--bucket-mb", "1"]),
                ("hierarchical", hierarchical),
            ):
                records = run_plain_torch(
                    lab, interleave(spec), flags, flops=STEP_FLOPS / SLOWER["step"]
                )
                seconds.setdefault(name, []).append(
                    statistics.median(record["seconds"] for record in records)
                )
                exposed.setdefault(name, []).append(
                    statistics.median(record["exposed_s"] for record in records)
                )
                losses[name] = [record["loss"] for record in records]
    rows = [_row("step", f"step, {name}", values, "s") for name, values in seconds.items()]
    rows += [
        _row("step", f"of which exposed, {name}", values, "s") for name, values in exposed.items()
    ]
    ratios = [a / b for a, b in zip(seconds["flat ring"], seconds["hierarchical"])]
    rows.append(_row("step", "flat ring / hierarchical", ratios, "x", ">= 1.35"))
    worst = max(abs(a - b) for a, b in zip(*losses.values()))
    rows.append(
        Row.median(
            "step",
            "largest difference of the losses",
            [worst],
            unit="nats",
            emulated=False,
            target="<= 1e-5",
        )
    )
    return rows


def run_plain_torch(lab: Lab, nodes: Any, flags: list[str], flops: float) -> list[dict[str, Any]]:
    """Run examples/plain_torch, and return the lines of its log without the first steps.

    Args:
        lab: The emulated nodes.
        nodes: Nodes in the order of their ranks.
        flags: Flags of the script. Without --holmes, gloo uses Ethernet.
        flops: FLOP/s of an emulated GPU.
    """
    steps, skip = 10, 3
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "log.jsonl")
        script = examples() / "plain_torch" / "train.py"
        command = [
            sys.executable,
            str(script),
            *PLAIN,
            "--steps",
            str(steps),
            "--log-file",
            str(log),
            *flags,
        ]
        env = {} if "--holmes" in flags else {"GLOO_SOCKET_IFNAME": "eth0"}
        accelerator = {"flops": flops, "classes": ["Block"]}
        result = lab.run(
            command, order=nodes, env=env, preload=("torch",), timeout=200, accelerator=accelerator
        )
        if result.returncode:
            failed = result.first_failed
            raise SystemExit(f"plain_torch failed on rank {failed}:\n{result.outputs[failed]}")
        return [json.loads(line) for line in log.read_text().splitlines()][skip:]


def pipeline(repetitions: int, case: str = "pipeline") -> list[Row]:
    """Compare the step times of DeepSpeed's pipeline engine without and with holmes, on both clusters.

    Args:
        repetitions: Runs of each variant.
        case: "pipeline" (6 micro-batches) or "pipeline 8".
    """
    with slower_clusters("pipeline") as (file, spec):
        return _pipeline(case, file, spec, repetitions)


def _pipeline(case: str, file: Path, spec: SiteSpec, repetitions: int) -> list[Row]:
    """Run DeepSpeed's pipeline engine without and with holmes, and return the rows of results.

    The variants are stock, holmes without and with overlap of the gradient reductions, and all
    nodes in one fast cluster ("all-RDMA"), without and with overlap.

    Args:
        case: "pipeline" (6 micro-batches) or "pipeline 8".
        file: Cluster file of `spec`.
        spec: Two clusters of 4 nodes.
        repetitions: Runs of each variant.
    """
    order = interleave(spec)
    one_fast_cluster = all_rdma(spec)
    holmes = ("--holmes", "--holmes-cluster", str(file), "--holmes-overlap")
    variants = [
        Variant("stock", spec, order),
        Variant("holmes, not overlapped", spec, order, flags=(*holmes, "off")),
        Variant("holmes", spec, order, flags=(*holmes, "on")),
        one_fast_cluster,
        replace(
            one_fast_cluster,
            name="all-RDMA, overlapped",
            flags=("--holmes", "--holmes-overlap", "on"),
        ),
    ]
    series = compare(
        variants,
        [
            str(examples() / "deepspeed_pipeline" / "train.py"),
            *PIPELINE,
            "--micro-batches",
            str(MICRO_BATCHES[case]),
        ],
        repetitions=repetitions,
        steps=8,
        skip=2,
        accelerator={"flops": 3e9 / SLOWER["pipeline"], "classes": ["Block"]},
        on_run=lambda name, repetition: tell(f"pipeline, repetition {repetition + 1}: {name}"),
    )
    rows = [_row(case, f"step, {name}", measured.medians, "s") for name, measured in series.items()]
    for over, under, target in (
        ("stock", "holmes", ">= 1.67"),
        ("all-RDMA", "holmes", ">= 1.05"),
        ("all-RDMA, overlapped", "holmes", ">= 0.98"),
        ("holmes, not overlapped", "holmes", ""),
        ("all-RDMA", "all-RDMA, overlapped", ""),
    ):
        rows.append(_ratio(case, series, over, under, target))
    worst = max_loss_difference(series["stock"], series["holmes"])
    metric = "largest difference of the losses, holmes and stock"
    rows.append(Row.median(case, metric, [worst], unit="nats", emulated=False, target="<= 1e-6"))
    return rows


def _ratio(case: str, series: dict[str, Series], over: str, under: str, target: str) -> Row:
    """Return a row with the step time of the variant `over`, divided by that of `under`.

    Args:
        case: Name of the case in the results.
        series: Variant -> its measurements.
        over, under: Names of two variants.
        target: A bound on the ratio, such as "<= 0.5"; "" if there is none.
    """
    ratios = [a / b for a, b in zip(series[over].medians, series[under].medians)]
    busy = max(series[over].busy, series[under].busy)
    return Row.median(
        case, f"{over} / {under}", ratios, unit="x", emulated=True, target=target, busy=busy
    )


def gather(repetitions: int, case: str = "gather") -> list[Row]:
    """Compare gathering updated weights after the step and during the next forward pass.

    The job uses the distributed optimizer of megatron-core, with --holmes-overlap on.
    """
    with slower_clusters("gather") as (file, spec):
        flags = (
            "--holmes",
            "--holmes-cluster",
            str(file),
            "--holmes-overlap",
            "on",
            "--holmes-sizes",
            "pipeline=2",
        )
        under = Variant("under the forward", spec, interleave(spec), flags=flags)
        waited = replace(under, name="waited for", env={"HOLMES_DISABLE": "megatron-gather"})
        script = str(examples() / "megatron_core" / "train.py")
        series = compare(
            [waited, under, replace(waited, name="waited for, again")],
            [script, *GATHER, "--micro-batches", str(GATHER_MICRO_BATCHES[case])],
            repetitions=repetitions,
            steps=16,
            skip=3,
            preload=MEGATRON,
            accelerator={
                "flops": 3e9 / SLOWER["gather"],
                "classes": ["TransformerLayer"],
                "layout": "sbh",
            },
            on_run=lambda name, repetition: tell(f"{case}, repetition {repetition + 1}: {name}"),
        )
    rows = [
        _row(case, f"step, weights {name}", measured.medians, "s")
        for name, measured in series.items()
    ]
    rows.append(_ratio(case, series, "waited for", "under the forward", ""))
    rows.append(_ratio(case, series, "waited for", "waited for, again", ""))
    worst = max_loss_difference(series["waited for"], series["under the forward"])
    rows.append(
        Row.median(
            case,
            "largest difference of the losses",
            [worst],
            unit="nats",
            emulated=False,
            target="<= 1e-6",
        )
    )
    return rows


def ring(repetitions: int) -> list[Row]:
    """Compare a flat ring with a hierarchical all-reduce of 10 MiB over 4 + 4 nodes.

    The link between the clusters has an eighth of the rate inside them.
    """
    spec: SiteSpec = load_spec(CLUSTERS)
    order = [node for cluster in spec.clusters for node in cluster.nodes]
    with Lab(spec, realtime=True) as lab:
        for cluster in spec.clusters:
            for node in cluster.nodes:
                lab.set_rate(node, f"{cluster.kind}0", 8 * spec.ethernet_rate_bps)
        seconds, sent = _time_reductions(
            lab,
            ("flat ring", "hierarchical"),
            order,
            clusters=[list(range(4)), list(range(4, 8))],
            counted=spec.clusters[0].nodes,
            repetitions=repetitions,
        )
    rows = [_row("ring", f"10 MiB, {name}", values, "s") for name, values in seconds.items()]
    metric = "sent by one cluster's Ethernet NICs / gradient"
    # Between C = 2 clusters, a hierarchical all-reduce sends 2 (C - 1) / C = 1 times the gradients,
    # as a ring of the clusters would. The target has room for headers.
    for name, target in (("flat ring", ""), ("hierarchical", "<= 1.05")):
        rows.append(_row("ring", f"{metric}, {name}", sent[name], "x", target))
    rows.append(
        _row(
            "ring",
            "flat ring / hierarchical",
            [a / b for a, b in zip(*seconds.values())],
            "x",
            ">= 2.5",
        )
    )
    return rows


def owners(repetitions: int) -> list[Row]:
    """Compare an all-reduce with chains that reduce each part to the one rank that needs it.

    There are 10 MiB of gradients. Under ZeRO 1, a rank (the owner of a part) needs only the sum of
    its part of the gradients. In a chain, the partial sum goes from rank to rank, and ends at the
    owner.
    """
    spec: SiteSpec = load_spec(CLUSTERS)
    rows = []
    with Lab(spec, realtime=True) as lab:
        for count in (4, 2):
            order, size = spec.clusters[0].nodes[:count], f"{count} nodes"
            seconds, sent = _time_reductions(
                lab,
                ("all-reduce", "to owners"),
                order,
                clusters=[],  # neither way is hierarchical
                counted=order,
                repetitions=repetitions,
            )
            rows += [
                _row("owners", f"{size}, 10 MiB, {name}", values, "s")
                for name, values in seconds.items()
            ]
            for name, values in sent.items():
                per_node = [value / count for value in values]
                rows.append(
                    _row("owners", f"{size}, sent by a node / gradient, {name}", per_node, "x")
                )
            ratios = [a / b for a, b in zip(*seconds.values())]
            rows.append(_row("owners", f"{size}, all-reduce / to owners", ratios, "x"))
    return rows


class TimedReductions(NamedTuple):
    """Seconds and sent bytes of several methods to reduce gradients.

    Each dictionary is: name of a method -> one number for each run.
    """

    seconds: dict[str, list[float]]  # of a reduction: the median of a run
    sent: dict[str, list[float]]  # bytes over Ethernet in one reduction, in units of the gradients


def _time_reductions(
    lab: Lab,
    names: Sequence[str],
    order: Sequence[str],
    clusters: list,
    counted: Sequence[str],
    repetitions: int,
) -> TimedReductions:
    """Reduce 10 MiB of gradients by several methods in turn, and return their times and traffic.

    Times are in seconds. The traffic is the bytes that the counted nodes sent over Ethernet in a reduction,
    as a multiple of the 10 MiB: bytes / RING_BYTES.

    Args:
        lab: The running emulated nodes.
        names: The methods: "hierarchical", "to owners" (each rank gets the sum of its own part
            only), or any other name for an all-reduce of torch.
        order: Nodes in the order of their ranks.
        clusters: Ranks of each cluster; [] if no method is hierarchical.
        counted: Nodes whose Ethernet bytes are counted.
        repetitions: Runs of each method.
    """
    times = 4  # timed reductions of a job; the first is not timed, but its bytes are counted
    seconds: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repetitions):
        for name in names:
            before = lab.counters()
            command = [sys.executable, __file__, "--rank", name, json.dumps(clusters), str(times)]
            result = lab.run(command, order=order, preload=("torch",), timeout=120)
            if result.returncode:
                raise SystemExit(result.outputs[result.first_failed])
            after = lab.counters()
            printed_by_rank_0 = result.stdout[0].split()
            seconds[name].append(float(printed_by_rank_0[-1]))
            # Counters of a NIC are (received, sent).
            sent_bytes = sum(after[node]["eth0"][1] - before[node]["eth0"][1] for node in counted)
            # Bytes of one reduction, in multiples of 10 MiB. The untimed first reduction is counted, too.
            sent[name].append(sent_bytes / (times + 1) / RING_BYTES)
    return TimedReductions(seconds, sent)


def ring_rank(name: str, clusters: list[list[int]], times: int) -> None:
    """Run one rank of the case "ring" or "owners", and print the median seconds on rank 0.

    Args:
        name: "hierarchical", "to owners" (each rank gets the sum of its own part only), or any
            other name for an all-reduce of torch.
        clusters: Ranks of each cluster, for "hierarchical".
        times: Number of measurements.
    """
    import torch.distributed as dist

    from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce
    from holmes_ext.runtime.reduce.owned import ReduceToOwners

    join_group(hierarchical=name == "hierarchical")
    if name == "hierarchical":
        time_sums(HierarchicalAllReduce(clusters).all_reduce, RING_BYTES, times)
    elif name == "to owners":
        world, reduction = dist.get_world_size(), ReduceToOwners(dist.group.WORLD)
        elements = RING_BYTES // 4 // world  # float32 elements of a rank's part
        parts = [(elements, owner) for owner in range(world)]
        time_sums(
            lambda flat: reduction.reduce(flat, parts),
            RING_BYTES,
            times,
            summed=lambda flat: flat.chunk(world)[dist.get_rank()],  # this rank's part is checked
        )
    else:
        time_sums(lambda flat: dist.all_reduce(flat, async_op=True), RING_BYTES, times)


def _row(case: str, metric: str, values: list[float], unit: str, target: str = "") -> Row:
    return Row.median(case, metric, values, unit=unit, emulated=True, target=target)


CASES = {
    "overlap": overlap,
    "pipeline": pipeline,
    "pipeline 8": partial(pipeline, case="pipeline 8"),
    "ring": ring,
    "owners": owners,
    "step": step,
    "gather": gather,
    "gather 6": partial(gather, case="gather 6"),
}


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--repetitions", type=int, default=3)
    args = arguments.parse_args()
    # megatron-core imports a shim from there on machines without CUDA.
    shim = str(Path(__file__).resolve().parents[1] / "examples" / "megatron_core" / "on_cpu")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [shim, os.environ.get("PYTHONPATH", "")])
    )
    rows = [
        row for name in chosen_cases(args.cases, CASES) for row in CASES[name](args.repetitions)
    ]
    return finish(
        rows, args.json, "Gradient reduction: overlapped, and hierarchical (compute emulated)"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        ring_rank(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
