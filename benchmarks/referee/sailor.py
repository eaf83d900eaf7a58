"""Runs a planner of Sailor's repository in its own process: writes its input files and reads its plan."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from holmes_ext.errors import HolmesError
from referee import sailor_files as files
from referee.cases import Case
from referee.limited import last_line, run
from referee.plans import PlannedJob, Stage

PLANNERS = (*files.BY_ZONE, *files.KINDS, *files.FLAT)
PROCESS = Path(__file__).with_name("sailor_process.py")
HOW = (
    "git clone https://github.com/eth-easl/sailor, a Python with torch, pandas, pymetis, pyomo, pybind11, "
    "and libjsoncpp-dev; then --sailor DIR --python PYTHON"
)
#: Why a planner is in the table without plans.
LACKS = {
    "Aceso": "its profile is one of each operator of each model, pickled from a run on a GPU; a case has "
    "none",
}
#: Planners with C++ code -> seconds for compiling it, once for all cases (for all with GPUs of as
#: much memory).
COMPILED, BUILD_S = ("SAILOR", "Galvatron"), 900.0
#: Files of Sailor's repository that its planners import and read.
CODE = "Planner", "providers", "profiling", "__init__.py"


@dataclass(frozen=True)
class Answer:
    """Plans that a planner has found."""

    plans: tuple[PlannedJob, ...]  # the best first
    seconds: float  # CPU seconds of the search


def ask(case: Case, planner: str, sailor: Path, python: str, limit: float) -> Answer:
    """Run a planner, and return its plans.

    Args:
        case: The planning problem.
        planner: A name in PLANNERS.
        sailor: A clone of Sailor's repository.
        python: Interpreter with the packages that Sailor's planners import.
        limit: CPU seconds.

    Raises:
        HolmesError: There is no plan. The message has the reason.
    """
    if planner in LACKS:
        raise HolmesError(LACKS[planner])
    view = files.View.of(case, planner)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        request, answer, log = root / "request.json", root / "answer.json", root / "log.txt"
        request.write_text(json.dumps(written(view, planner, sailor, root) | {"limit": limit}))
        command = [python, PROCESS, request, answer]
        if planner in COMPILED:  # compiling does not count as part of the search
            try:
                with log.open("w") as out:
                    subprocess.run(
                        [*command, "build"],
                        stdout=out,
                        stderr=out,
                        timeout=BUILD_S,
                        cwd=root,
                        check=True,
                    )
            except subprocess.CalledProcessError:
                raise HolmesError(f"its C++ does not compile: {last_line(log)}") from None
        run(command, limit, root, log)
        if not answer.exists():
            raise HolmesError(f"its process ended with: {last_line(log)}")
        reply = json.loads(answer.read_text())
    if "error" in reply:
        raise HolmesError(reply["error"])
    plans = tuple(read(view, planner, reply["plans"]))
    if not plans:
        raise HolmesError("it found no plan")
    return Answer(plans, reply["seconds"])


def written(view: files.View, planner: str, sailor: Path, root: Path) -> dict[str, Any]:
    """Write the input files beside a copy of Sailor's code, and return a planner's request.

    The request is for sailor_process.py.

    The copy has only the files that the planners import and read (CODE), without profiles,
    measurements and pictures. Sailor's code reads its networks and the model from files in its own
    folders; they are replaced.

    Args:
        view: The case as the planner sees it.
        planner: A name in PLANNERS.
        sailor: A clone of Sailor's repository.
        root: Folder for the files.
    """
    source, copy = sailor / "sailor", root / "sailor" / "sailor"
    if not (source / "Planner").is_dir():
        raise HolmesError(f"--sailor {sailor}: no sailor/Planner there; {HOW}")
    left_out = shutil.ignore_patterns(
        "profiles", "validation", "aceso_validation*", "*.csv", "*.png", ".git", "runtime"
    )
    for name in CODE:
        if (source / name).is_dir():
            shutil.copytree(source / name, copy / name, ignore=left_out)
        elif (source / name).exists():
            copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, copy / name)
    write_json(copy / "providers/multizone_bandwidths_het.json", files.network(view))
    write_json(copy / "providers/intra_node_bandwidths.json", files.inside(view))
    write_json(
        copy / "providers/gcp/communication_cost.json",
        {a: dict.fromkeys(files.ZONES, 0.0) for a in files.ZONES},
    )
    write_json(copy / "Planner/llm_info.json", files.memory_info(view))
    write_json(root / "training.json", files.training(view))
    quotas = {gpu: dict.fromkeys(files.ZONES, view.case.site.world_size) for gpu in view.gpus}
    write_json(root / "quotas.json", quotas)
    memory = {gpu: ceil(view.memory(gpu) / 2**30) for gpu in view.gpus}
    path = str(profile(view, planner, root / "profile"))
    if planner == "SAILOR":
        path += "/"  # Sailor's code appends names to the path as text
    return {
        "planner": planner,
        "root": str(root),
        "profile": path,
        "cluster": files.cluster(view, planner),
        "training": files.training(view),
        "zones": files.ZONES,
        "memory_gib": memory,
        "cache": str(sailor / "referee_build"),  # compiled libraries, for later runs
    }


def profile(view: files.View, planner: str, folder: Path) -> Path:
    """Write the profile of the model in the form of one planner, and return its path.

    A profile has the seconds and bytes of each layer. Each planner reads it from other files:

        one file                 Varuna, Piper, FlashFlex, DTFM, Atlas
        several files            Galvatron
        a folder for each GPU    SAILOR (one file), AMP (one for each tensor-parallel size), Metis
                                 (one for each tensor-parallel size and micro-batch)

    Args:
        view: The case as the planner sees it.
        planner: A name in PLANNERS.
        folder: For the file, or for all files of the profile.
    """
    file = folder / "profile.json"
    if planner in ("Varuna", "Piper", "FlashFlex"):
        make = {"Varuna": files.varuna, "Piper": files.piper, "FlashFlex": files.flashflex}[planner]
        return write_json(file, make(view))
    if planner == "Galvatron":
        for name, content in files.galvatron(view).items():
            write_json(folder / name, content)
        return folder
    if planner in ("DTFM", "Atlas"):
        # files.seconds() is Sailor's profile of a GPU type: seconds of each layer's passes.
        return write_json(file, {files.MODEL: {gpu: files.seconds(view, gpu) for gpu in view.gpus}})
    # SAILOR, AMP and Metis: for each type of GPU, a folder with the files of this planner.
    for gpu in files.GPUS if planner == "Metis" else view.gpus:
        gpu_folder = folder / gpu
        if planner == "SAILOR":
            write_json(gpu_folder / "profile.json", files.seconds(view, gpu))
        for tensor in view.tensors:
            if planner == "AMP":
                gpu_folder.mkdir(parents=True, exist_ok=True)
                np.save(
                    gpu_folder / f"profile_{tensor}.npy",
                    [row["forward"] for row in view.layers(gpu, tensor, 1)],
                )
            for size in files.MICRO_BATCHES if planner == "Metis" else ():
                # Metis reads files of all GPU types, also of those that the case does not have.
                known = gpu if gpu in view.gpus else next(iter(view.gpus))
                write_json(
                    gpu_folder / f"mbs{size}_tmp{tensor}.json",
                    files.metis(view, known, tensor, size),
                )
    return folder


def write_json(path: Path, content: object) -> Path:
    """Write JSON into a file, make its folder, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def read(view: files.View, planner: str, plans: list[Mapping[str, Any]]) -> Iterator[PlannedJob]:
    """Yield the plans of a planner as PlannedJobs, without those that name no stages.

    A PlannedJob has the blocks of each stage, and the clusters of the GPUs of its replicas.

    Args:
        view: The case as the planner sees it.
        planner: A name in PLANNERS.
        plans: Plans in the planner's form.
    """
    for plan in plans:
        predicted = float(plan.get("iter_time") or plan.get("iteration_time") or 0.0)
        if not predicted and plan.get("estimated_throughput"):
            predicted = 1 / float(plan["estimated_throughput"])
        if planner == "Metis":
            predicted /= 1000  # milliseconds
        # A plan of Varuna or Galvatron has only sizes: "P" stages, "D" replicas, "T" tensor ranks.
        stages = _even_stages(view, plan) if "P" in plan else _stages(view, plan["pipeline_list"])
        if stages:
            yield PlannedJob(stages, int(plan["mbs"]), predicted)


def _even_stages(view: files.View, plan: Mapping[str, Any]) -> tuple[Stage, ...]:
    """Return the stages of a plan of Varuna or Galvatron.

    Such a plan has three sizes: "P" stages, "D" replicas and "T" tensor-parallel ranks. Layers are
    divided evenly, and the embedding (the first) and the output layer (the last) count as layers.
    GPUs are used in the order of the cluster file, as by a launcher.
    """
    free_gpus = _FreeGpus(view)
    layers = view.case.model.layers + 2
    borders = [round(stage * layers / plan["P"]) for stage in range(plan["P"] + 1)]
    all_gpus = next(iter(view.groups))  # the only group: these planners see all nodes as equal
    stages = []
    for low, high in zip(borders, borders[1:]):
        replicas = []
        for _ in range(plan["D"]):
            # take_next() uses the next free GPU, and returns the name of its cluster.
            replicas.append(tuple(free_gpus.take_next(all_gpus) for _ in range(plan["T"])))
        # _blocks() counts the layers of the stage without the embedding and the output layer.
        stages.append(Stage(_blocks(view, range(low, high)), tuple(replicas)))
    return tuple(stages)


def _stages(view: files.View, pipelines: list[Mapping[str, Any]]) -> tuple[Stage, ...]:
    """Return the stages of a plan in Sailor's form, with the clusters of their GPUs.

    A pipeline has "layers_per_stage" (the numbers of the layers of each stage) and "tmp_per_stage".
    The latter has for each stage its replicas, each as a pair (nodes, tensor-parallel size). A node
    is (GPU type, number of GPUs, zone).

    Args:
        view: The case as the planner sees it.
        pipelines: Usually one pipeline with replicas of each stage. FlashFlex has several pipelines
            that are replicas of each other. The result then has the stages and layers of the first
            pipeline. A stage of another pipeline is a replica of the first pipeline's stage at the
            same relative position. (With 4 and 2 stages, numbered from 0: stage 1 of the 2 is a
            replica of stage 2 of the 4.)
    """
    first = pipelines[0]
    free_gpus = _FreeGpus(view)
    stages: list[list[tuple[str, ...]]] = [
        [] for _ in first["layers_per_stage"]
    ]  # replicas of each
    for pipeline in pipelines:
        count = len(pipeline["layers_per_stage"])
        for number, replicas in enumerate(pipeline["tmp_per_stage"]):
            # Stage `number` of `count` is at this stage of the first pipeline.
            replicas_of_stage = stages[number * len(stages) // count]
            for nodes, tensor in replicas:
                node_keys = [(gpu_type, zone) for gpu_type, _gpus, zone, *_ in nodes]
                clusters = []  # of each tensor-parallel rank
                for rank in range(tensor):
                    # The tensor-parallel ranks are divided evenly among the nodes.
                    node = min(rank * len(node_keys) // tensor, len(node_keys) - 1)
                    # Uses the next free GPU of this type and zone, and returns its cluster.
                    clusters.append(free_gpus.take_next(node_keys[node]))
                replicas_of_stage.append(tuple(clusters))
    blocks = [_blocks(view, layers) for layers in first["layers_per_stage"]]
    return tuple(Stage(stage_blocks, tuple(stage)) for stage_blocks, stage in zip(blocks, stages))


def _blocks(view: files.View, layers: Any) -> int:
    """Return the number of transformer blocks among layers.

    Args:
        view: The case. It gives the number of all blocks.
        layers: Numbers of layers. 0 is the embedding, and the last number is the output layer: both
            are no blocks.
    """
    return sum(0 < layer <= view.case.model.layers for layer in layers)


class _FreeGpus:
    """GPUs of a case that a plan has not used yet, with their clusters.

    A planner names a GPU by its type and zone only, and several clusters may share these. So each
    GPU of a plan gets the next free GPU of this type and zone, in the order of the cluster file.
    """

    def __init__(self, view: files.View):
        self.view = view
        processes = view.case.site.processes
        #: (type of the GPU, zone) -> cluster of each GPU that is still free.
        self.left: dict[tuple[str, str], list[str]] = {}
        for key, names in view.groups.items():
            free = []
            for name in names:
                nodes = sum(node.cluster == name for node in view.case.site.nodes)
                free += [name] * (nodes * processes)
            self.left[key] = free

    def take_next(self, key: tuple[str, str]) -> str:
        """Use the next free GPU with a type and zone, and return its cluster.

        Raises:
            HolmesError: The plan has more such GPUs than the case.
        """
        if not self.left.get(key):
            raise HolmesError(f"its plan has more GPUs of {' in '.join(key)} than the case")
        return self.left[key].pop(0)
