"""Runs DT-FM's search on a case.

DT-FM gives every two GPUs a link of their own, and all stages the same size, chosen by its user.
Its published cases have 8 stages of as many GPUs as remain. Here the number of stages is as near to
8 as possible, with at least two GPUs for each stage (its code fails with one). Layers are even, and
the micro-batch is 1. Its objective contains only communication, and no step time that could be
compared.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.sizes import divisors
from referee.cases import Case
from referee.limited import run
from referee.plans import PlannedJob, Stage
from referee.sailor import Answer, write_json
from referee.sailor_files import NVLINK_BPS, View

NAME, STAGES = "DT-FM (its own)", 8
PROCESS = Path(__file__).with_name("dtfm_process.py")
FOLDER = "scheduler/heuristic_evolutionary_solver"
HOW = "git clone https://github.com/DS3Lab/DT-FM; then --dtfm DIR, and --python one with numpy and scipy"


def ask(case: Case, repository: Path, python: str, limit: float) -> Answer:
    """Run the search of DT-FM (a published planner), and return its plan.

    DT-FM runs in a separate process: the program dtfm_process.py (PROCESS). This function passes
    it a JSON file with the numbers of GPUs and stages, message sizes and links, and reads its
    answer. HOW is a hint for the user how to install DT-FM.

    Args:
        case: The planning problem.
        repository: A clone of DT-FM.
        python: Interpreter with the packages that DT-FM imports.
        limit: CPU seconds.

    Raises:
        HolmesError: DT-FM is not in `repository`, or its process failed or found no plan within the
            limit. The message has the reason.
    """
    folder = repository / FOLDER
    if not (folder / "scheduler.py").exists():
        raise HolmesError(f"--dtfm {repository}: no {FOLDER}/scheduler.py there; {HOW}")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        answer, request = (
            root / "answer.json",
            write_json(root / "request.json", request_of(case) | {"limit": limit}),
        )
        command = [python, PROCESS, folder.resolve(), request, answer]
        # Raises HolmesError if the process fails, or uses all of its CPU seconds.
        run(command, limit, root, root / "log.txt")
        reply = json.loads(answer.read_text())  # "stages": numbers of the GPUs of each stage
    return Answer((read(case, reply["stages"]),), reply["seconds"])


def request_of(case: Case) -> dict:
    """Return a case in the form of the global variables of DT-FM's scheduler.py.

    Returns:
        "num_devices": GPUs. "way": pipeline stages. "partition_size": GPUs of a stage.
        "send_gradient_size", "send_activation_size": gigabytes; the gradients of a stage on a GPU,
        and all activations that a GPU sends in a step. "delay_ms", "rate_gbps": matrices with the
        latency and the rate (Gb/s) between every two GPUs.
    """
    model = case.model
    world = case.site.world_size
    # Possible numbers of stages: at least two stages of at least two GPUs (DT-FM's code fails with
    # one), at most one for each layer, and a batch that the replicas can share.
    fitting = [
        size
        for size in divisors(world)
        if 1 < size <= min(model.layers, world // 2) and case.batch % (world // size) == 0
    ]
    pipeline = min(fitting, key=lambda size: abs(size - STAGES))  # number of stages nearest to 8
    # A View describes the networks as a planner of Sailor's repository sees them. That for Sailor
    # itself has a link for every pair of clusters: each of its groups is a single cluster.
    view = View.of(case, "SAILOR")
    link = {}  # pair of clusters -> (bytes/s, seconds of latency)
    for first in view.groups:
        for second in view.groups:
            [first_cluster] = view.groups[first]
            [second_cluster] = view.groups[second]
            link[first_cluster, second_cluster] = view.link(first, second)
    clusters = cluster_of_each_gpu(case)
    gpus_of_node = case.site.processes
    nvlink_bytes_per_s = (case.gpu(clusters[0]).link_bps or NVLINK_BPS) / 8
    delays_ms = []  # from each GPU to each GPU
    rates_gbps = []  # the same
    for i, cluster in enumerate(clusters):
        delays_of_gpu = []
        rates_of_gpu = []
        for j, other_cluster in enumerate(clusters):
            bytes_per_s, latency_s = link[cluster, other_cluster]
            is_same_node = i // gpus_of_node == j // gpus_of_node
            if is_same_node:
                bytes_per_s = nvlink_bytes_per_s
                latency_s = 0.0
            delays_of_gpu.append(1000 * latency_s)
            rates_of_gpu.append(8 * bytes_per_s / 1e9)
        delays_ms.append(delays_of_gpu)
        rates_gbps.append(rates_of_gpu)
    # Bytes of all activations that a GPU sends in a step.
    sent = case.batch / (world // pipeline) * model.sequence * model.hidden * model.activation_width
    return {
        "num_devices": world,
        "way": pipeline,
        "partition_size": world // pipeline,
        "send_gradient_size": model.parameters * model.gradient_width / pipeline / 2**30,
        "send_activation_size": sent / 2**30,
        "delay_ms": delays_ms,
        "rate_gbps": rates_gbps,
    }


def cluster_of_each_gpu(case: Case) -> list[str]:
    """Return the cluster of every GPU, node by node."""
    return [node.cluster for node in case.site.nodes for _ in range(case.site.processes)]


def read(case: Case, stages: list[list[int]]) -> PlannedJob:
    """Return DT-FM's plan as a PlannedJob, the common form of all planners' plans.

    A PlannedJob has the transformer blocks of each stage, and the clusters of the GPUs of each of
    its replicas.

    Args:
        case: The planning problem.
        stages: Numbers of the GPUs of each stage. GPUs of neighbouring stages at the same position
            exchange activations.
    """
    clusters = cluster_of_each_gpu(case)
    blocks = uniform(case.model.layers, len(stages))  # of each stage
    planned_stages = []
    for count, gpus in zip(blocks, stages):
        # Each replica of a stage has a single GPU: DT-FM knows no tensor parallelism.
        replicas = tuple((clusters[gpu],) for gpu in gpus)
        planned_stages.append(Stage(count, replicas))
    return PlannedJob(tuple(planned_stages), micro_batch=1)
