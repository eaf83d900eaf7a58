"""Installs the CUDA build of torch for CPUs without the large CUDA libraries (matrix.py --slim).

torch's libraries are linked with cuBLAS, cuDNN, NCCL and others, and do not load if one of these is
missing. This module writes a small library in place of each. Its functions abort. An environment
then has 2 GB instead of 5, and is made in a minute. The runtime (libcudart) and CUPTI are real:
torch calls them without a GPU, too.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

#: Requirements of torch that are left out: packages of CUDA libraries, and Triton (it compiles for
#: GPUs).
LEFT_OUT = re.compile(r"^Requires-Dist: (nvidia-|cuda-|triton).*\n", re.MULTILINE)
CUDA = re.compile(r"_*(p?nccl|cu|nv)")


def install(python: Path, torch: str, more: list[str]) -> None:
    """Install torch into an environment, with small stub libraries in place of those of CUDA.

    Only the CUDA runtime and CUPTI (the profiler's library) are real: torch calls them also without
    a GPU. The functions of the stubs abort. Other requirements of torch are installed later, with
    the packages of the row.

    Args:
        python: The interpreter of the environment.
        torch: A requirement such as "torch==2.9.1".
        more: Further arguments of pip.
    """
    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "--no-deps", torch, *more], check=True)
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    text = metadata.read_text()
    real = re.findall(r"^Requires-Dist: (nvidia-cuda-(?:runtime|cupti)[^;]*)", text, re.MULTILINE)
    # Newer torches require a single package with all libraries as extras, such as
    # cuda-toolkit[cublas,...]==13.0.
    toolkit = re.search(r"^Requires-Dist: cuda-toolkit\[[^]]*\]\s*([^;]*)", text, re.MULTILINE)
    if toolkit:
        version = toolkit[1]
        real = [f"cuda-toolkit[cudart,cupti]{version}"]
    # Without this, later installations would bring the libraries that are left out.
    metadata.write_text(LEFT_OUT.sub("", text))
    if real:  # a torch for CPUs requires none
        subprocess.run([*pip, *map(str.strip, real)], check=True)
    write_stub_libraries(site)


def write_stub_libraries(site: Path) -> None:
    """Write a stub into torch/lib for each missing library that the libraries of torch are linked with.

    A stub has all functions that torch looks for, with their version nodes (symbol versions). They abort.

    Args:
        site: The folder site-packages.
    """
    folder = site / "torch" / "lib"
    libraries, brought = list(folder.glob("*.so")), list(site.glob("nvidia/**/*.so*"))
    present = {file.name for file in (*folder.iterdir(), *brought)}
    linked = re.findall(
        r"NEEDED.*\[(lib(?:cu|nv|nccl)[^]]*)\]", _output_of("readelf", "-d", *libraries)
    )
    # libcuda is the driver. It stays missing, because torch takes that for a machine without a GPU.
    needed = {name for name in linked if name not in present and name != "libcuda.so.1"}
    real = set(re.findall(r" [A-Z] (\w+)", _output_of("nm", "-D", "--defined-only", *brought)))
    of_node: dict[str, set[str]] = defaultdict(set)  # version node, "" for none -> functions
    undefined = _output_of("nm", "-D", "--undefined-only", *libraries)
    for name, node in re.findall(r" [Uw] (\w+)(?:@+(\S+))?$", undefined, re.MULTILINE):
        if CUDA.match(name) and name not in real:
            of_node[node].add(name)
    # Library -> its version nodes that torch's libraries need.
    nodes: dict[str, list[str]] = {}
    for library, of_library in re.findall(
        r"Version: 1 +File: (\S+) .*\n((?:.*Name: .*\n)*)",
        _output_of("readelf", "-V", "-W", *libraries),
    ):
        nodes[library] = [*nodes.get(library, []), *re.findall(r"Name: (\S+)", of_library)]
    for library in needed:
        with tempfile.TemporaryDirectory() as build:
            source, script = Path(build) / "functions.c", Path(build) / "nodes"
            versions = dict.fromkeys(nodes.get(library, ()))
            names = sorted(set().union(of_node[""], *(of_node[node] for node in versions)))
            functions = "".join(f"void {name}(void) {{ abort(); }}\n" for name in names)
            source.write_text(f"void abort(void);\n{functions}")
            lines = [
                f"{node} {{ global: {'; '.join(['none', *of_node[node]])}; }};\n"
                for node in versions
            ]
            script.write_text("".join(lines) or "{ global: *; };\n")
            subprocess.run(
                [
                    "gcc",
                    "-shared",
                    "-fPIC",
                    "-w",
                    "-fno-builtin",
                    "-o",
                    folder / library,
                    source,
                    f"-Wl,-soname,{library}",
                    f"-Wl,--version-script={script}",
                ],
                check=True,
            )


def _output_of(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
