"""Runs DT-FM's own search on a case.

DT-FM gives every two GPUs a link of their own, and all stages the same size, which its user chooses. Its
published cases have 8 stages of as many GPUs as remain. Here the number of stages is the one nearest to 8
with which each stage has at least two GPUs (its code fails with one). Layers are even, and the
micro-batch is 1. Its objective contains only communication, and no step time that could be compared.
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
    """Run DT-FM's search, and return its plan.

    Args:
        case: The planning problem.
        repository: A clone of DT-FM.
        python: Interpreter that has what DT-FM imports.
        limit: CPU seconds.

    Raises:
        HolmesError: There is no plan. The message has the reason.
    """
    folder = repository / FOLDER
    if not (folder / "scheduler.py").exists():
        raise HolmesError(f"--dtfm {repository}: no {FOLDER}/scheduler.py there; {HOW}")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        answer, request = (
            root / "answer.json",
            write_json(root / "request.json", asked(case) | {"limit": limit}),
        )
        command = [python, PROCESS, folder.resolve(), request, answer]
        run(command, limit, root, root / "log.txt")
        reply = json.loads(answer.read_text())
    return Answer((read(case, reply["stages"]),), reply["seconds"])


def asked(case: Case) -> dict:
    """Return a case in the form of the global variables of DT-FM's scheduler.py.

    Returns:
        "num_devices": GPUs. "way": pipeline stages. "partition_size": GPUs of a stage.
        "send_gradient_size", "send_activation_size": gigabytes; the gradients of a stage on a GPU,
        and all activations that a GPU sends in a step. "delay_ms", "rate_gbps": matrices with the
        latency and the rate (Gb/s) between every two GPUs.
    """
    model, world = case.model, case.site.world_size
    fitting = [
        size
        for size in divisors(world)
        if 1 < size <= min(model.layers, world // 2) and case.batch % (world // size) == 0
    ]
    pipeline = min(fitting, key=lambda size: abs(size - STAGES))  # number of stages nearest to 8
    # The view of Sailor has the links of every pair of clusters: each group is a single cluster.
    view, gpus = View.of(case, "SAILOR"), clusters_of(case)
    processes, link = case.site.processes, {}  # pair of clusters -> (bytes/s, seconds of latency)
    for first in view.groups:
        for second in view.groups:
            (first_cluster,), (second_cluster,) = view.groups[first], view.groups[second]
            link[first_cluster, second_cluster] = view.link(first, second)
    # Between GPUs of a node.
    inside = (case.gpu(gpus[0]).link_bps or NVLINK_BPS) / 8, 0.0
    pairs = [
        [inside if i // processes == j // processes else link[a, b] for j, b in enumerate(gpus)]
        for i, a in enumerate(gpus)
    ]
    sent = case.batch / (world // pipeline) * model.sequence * model.hidden * model.activation_width
    return {
        "num_devices": world,
        "way": pipeline,
        "partition_size": world // pipeline,
        "send_gradient_size": model.parameters * model.gradient_width / pipeline / 2**30,
        "send_activation_size": sent / 2**30,
        "delay_ms": [[1000 * pair[1] for pair in row] for row in pairs],
        "rate_gbps": [[8 * pair[0] / 1e9 for pair in row] for row in pairs],
    }


def clusters_of(case: Case) -> list[str]:
    """Return the cluster of every GPU, node by node."""
    return [node.cluster for node in case.site.nodes for _ in range(case.site.processes)]


def read(case: Case, stages: list[list[int]]) -> PlannedJob:
    """Return DT-FM's plan in the common form.

    Args:
        stages: Numbers of the GPUs of each stage. GPUs of neighbouring stages at the same position are
        paired.
    """
    gpus, blocks = clusters_of(case), uniform(case.model.layers, len(stages))
    # Each replica of a stage has a single GPU: DT-FM knows no tensor parallelism.
    placed = [
        Stage(count, tuple((gpus[gpu],) for gpu in stage)) for count, stage in zip(blocks, stages)
    ]
    return PlannedJob(tuple(placed), 1)
