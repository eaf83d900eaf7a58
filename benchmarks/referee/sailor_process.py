"""Runs one planner of Sailor (github.com/eth-easl/sailor, MIT) on files that sailor.py wrote.

    python sailor_process.py REQUEST.json ANSWER.json [build]

This is a separate process, with an interpreter that has Sailor's packages. It imports Sailor's
code unchanged. With `build` it only compiles the planner's C++ code.

The answer is {"plans": [...], "seconds": CPU seconds of the search} or {"error": a line}. Output of the
planner stays on stdout.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

#: Part of the limit after which Metis stops. Reading its plans takes further time.
METIS = 0.5
#: Largest number of plans in an answer; the best are the first.
PLANS = 40


def main():
    """Run the planner that a JSON file requests, and write the plans that it finds to another file.

    The command line is REQUEST.json ANSWER.json [build]. sailor.py writes the request. The answer
    is {"plans": [...], "count": their number, "seconds": CPU seconds} or {"error": a line}. With
    `build`, only the planner's C++ code is compiled.
    """
    request, answer = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    root = Path(request["root"])
    os.environ["SAILOR_PATH"] = str(root)
    os.chdir(root)
    sys.path[:1] = [
        str(root / "sailor"),
        str(root / "library"),
    ]  # this folder has modules of the same names
    if request["planner"] == "SAILOR":
        build_sailor(root, Path(request["cache"]), request["memory_gib"])
    if request["planner"] == "Galvatron":
        build_galvatron(root, Path(request["cache"]))
    if sys.argv[3:] == ["build"]:
        return
    try:
        planner = make_planner(request, root)
        begin = cpu_s()
        plans = planner.get_sorted_plans(
            cluster_config=request["cluster"], training_config=request["training"]
        )
        reply = {"plans": list(plans)[:PLANS], "count": len(plans), "seconds": cpu_s() - begin}
    except Exception as error:  # of the planner's code; it becomes the reason in the table
        import traceback

        traceback.print_exc()
        reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        if cpu_s() >= request["limit"]:  # the limit has ended a program that the planner started
            reply = {"error": f"no plan within {request['limit']:g} CPU s"}
    answer.write_text(json.dumps(reply, default=plain))


def cpu_s():
    """Return the CPU seconds of this process and of the programs that it ran."""
    return sum(os.times()[:4])


def plain(value):
    """Return a number of numpy or torch, or a vector of C++, in a form that JSON can store; else its text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if hasattr(value, "__iter__") else str(value)


def make_planner(request, root):
    """Return the planner object of Sailor's code that a request names.

    Before, the tables GPU_MEMORY_GB and GPU_PRICES of Sailor's module `constants` get the GPU types
    of the request.

    Args:
        request: The request: the name of the planner, the path of its profile, the memory of each
            GPU type, and the zones.
        root: Folder with the copy of Sailor's code and the input files.
    """
    from sailor.Planner.simulations import constants

    for gpu, memory in request["memory_gib"].items():
        constants.GPU_MEMORY_GB[gpu] = memory
        constants.GPU_PRICES[gpu] = dict.fromkeys(request["zones"], 1.0)
    name, profile, training = request["planner"], request["profile"], str(root / "training.json")
    info = json.loads((root / "sailor/sailor/Planner/llm_info.json").read_text())
    if name == "Varuna":
        from sailor.Planner.baselines.Varuna.varuna_planner import VarunaPlanner

        return VarunaPlanner(profile, "throughput")
    if name == "Piper":
        from sailor.Planner.baselines.Piper.piper_planner import PiperPlanner

        return PiperPlanner(profile)
    if name == "AMP":
        from sailor.Planner.baselines.AMP.amp_planner import AMPPlanner

        return AMPPlanner(profile, "throughput")
    if name == "Metis":
        from sailor.Planner.baselines.Metis import metis_planner

        metis_planner.TIME_BUDGET_SEC = METIS * request["limit"]
        metis_planner.time = SimpleNamespace(time=cpu_s)
        return metis_planner.MetisPlanner(profile, training)
    if name == "Galvatron":
        from sailor.Planner.baselines.Galvatron.galvatron_planner import GalvatronPlanner

        return GalvatronPlanner(training, profile, "throughput")
    if name == "FlashFlex":
        from sailor.Planner.baselines.FlashFlex.flashflex_planner import FlashFlexPlanner

        return FlashFlexPlanner(profile)
    if name == "Aceso":
        from sailor.Planner.baselines.Aceso.aceso_planner import AcesoPlanner

        return AcesoPlanner(profile)
    if name == "DTFM":
        from sailor.Planner.baselines.DTFM.dtfm_planner import DTFMPlanner

        return DTFMPlanner(profile, training, info, False)
    if name == "Atlas":
        from sailor.Planner.baselines.Atlas.atlas_planner import AtlasPlanner

        return AtlasPlanner(profile, training, info, False, "throughput")
    system, os.system = os.system, lambda command: 0  # its constructor compiles for Python 3.10
    try:
        from sailor.Planner.sailor_planner.cpp_src.planner import SailorPlanner

        return SailorPlanner(profile, training, str(root / "quotas.json"), "throughput", False)
    finally:
        os.system = system


def build_galvatron(root, cache):
    """Compile the C++ search of the planner Galvatron, and put the library beside its source.

    It is the dynamic program csrc/dp_core.cpp. A library in the cache is not compiled again.

    Args:
        root: Folder with the copy of Sailor's code, which includes Galvatron.
        cache: Folder with the libraries of earlier runs.
    """
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    source, library = (
        root / "sailor/sailor/Planner/baselines/Galvatron/csrc",
        cache / f"galvatron_dp_core{suffix}",
    )
    if not library.exists():
        import pybind11

        cache.mkdir(parents=True, exist_ok=True)
        folders = [
            f"-I{folder}" for folder in (pybind11.get_include(), sysconfig.get_path("include"))
        ]
        flags = ["-O3", "-shared", "-std=c++17", "-fPIC", *folders]
        subprocess.run(["g++", *flags, "dp_core.cpp", "-o", library], cwd=source, check=True)
    shutil.copy(library, source)


def build_sailor(root, cache, memory):
    """Compile Sailor's C++ library with the memory of the case's GPUs, unless it is in the cache.

    Args:
        root: Folder with the copy of Sailor's code.
        cache: Folder with the libraries of earlier runs.
        memory: GPU type -> GiB. Sailor's source has these numbers as constants, which are replaced.
    """
    source, suffix = (
        root / "sailor/sailor/Planner/sailor_planner/cpp_src",
        sysconfig.get_config_var("EXT_SUFFIX"),
    )
    key = "_".join(f"{gpu}_{size}" for gpu, size in sorted(memory.items()))
    library = cache / key / f"libplanner{suffix}"
    if not library.exists():
        import pybind11

        file = source / "planner_utils.cpp"
        text = file.read_text()
        for gpu, old in (("A100-40", 40), ("V100-16", 16)):
            text = text.replace(f'{{"{gpu}", {old}}}', f'{{"{gpu}", {memory.get(gpu, old)}}}')
        file.write_text(text)
        includes = [
            pybind11.get_include(),
            sysconfig.get_path("include"),
            os.environ.get("CPLUS_INCLUDE_PATH", ""),
        ]
        environment = {**os.environ, "CPLUS_INCLUDE_PATH": ":".join(filter(None, includes))}
        subprocess.run(["make", "libplanner.so"], cwd=source, env=environment, check=True)
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(next(source.glob("libplanner*.so")), library)
    (root / "library").mkdir(exist_ok=True)
    shutil.copy(library, root / "library")
    importlib.invalidate_caches()


if __name__ == "__main__":
    main()
