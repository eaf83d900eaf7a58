"""Builds the libraries of the emulated GPU for the torch of a command, or finds them in the cache.

Each new build of NCCL is checked once: the program csrc/check compares the results of its collectives with
the expected numbers, over sockets and over emulated RDMA.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.cluster.nccl import LAB_PLUGIN
from holmes_ext.errors import HolmesError
from holmes_lab.gpu import recipes
from holmes_lab.gpu.build import OnProgress, build, ignore_progress
from holmes_lab.gpu.cache import cache_folder, require_own_cache
from holmes_lab.gpu.compiler import find_compiler
from holmes_lab.gpu.nccl_source import DEFAULT, REPOSITORY, TRIED, NcclSource, find_nccl
from holmes_lab.gpu.torch_build import TorchBuild, find_torch, python_of

#: Seconds for the check of one network.
CHECK_S = 600
#: Variables of the user that would change the result of the check.
_IGNORED_BY_CHECK = (
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "CUDA_VISIBLE_DEVICES",
    "HOLMES_GPU_WATCH",
    "RANK",
)
#: Settings of NCCL on emulated GPUs: they disable features that are not emulated, and save memory.
NCCL_SETTINGS = {
    "NCCL_PAT_ENABLE": "0",  # the device code of this algorithm is not emulated
    "NCCL_LOCAL_REGISTER": "0",  # registered buffers are not emulated
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_NVLS_ENABLE": "0",  # there is no NVLink
    "NCCL_LL128_BUFFSIZE": "262144",  # the default takes 5 MB of this machine's memory for each connection
    "NCCL_NET_PLUGIN_REF_COUNT": "1",  # NCCL 2.29 cannot load an external plugin a second time
}
_MAX_NAMED_FUNCTIONS = 3


@dataclass(frozen=True)
class Libraries:
    """Libraries of the emulated GPU, built for one torch and one NCCL."""

    torch: TorchBuild
    source: NcclSource
    runtime: Path  # folder of the CUDA runtime, the CUDA driver and NVML
    operators: Path  # folder of torch's operators
    nccl: Path  # folder of NCCL and its network plugin

    @property
    def preload(self) -> tuple[Path, ...]:
        """Paths of the libraries that LD_PRELOAD must name.

        torch finds its own libraries by a path inside torch. Only preloaded libraries come before that path.
        """
        cuda_major = self.torch.cuda[0]
        return (
            self.runtime / f"libcudart.so.{cuda_major}",
            self.runtime / "libcuda.so.1",
            self.runtime / "libnvidia-ml.so.1",
            self.nccl / "libnccl.so.2",
        )

    @property
    def plugin(self) -> Path:
        """Path of NCCL's network plugin. It emulates RDMA over the emulated cluster's fast NICs."""
        return self.nccl / LAB_PLUGIN

    @property
    def operators_library(self) -> Path:
        """Path of the library that installs torch's CUDA operators, loaded with torch."""
        return self.operators / "libholmes_operators.so"


def libraries(
    command: Sequence[str],
    environ: Mapping[str, str],
    nccl_source: str | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Libraries:
    """Return the libraries of the emulated GPU for the torch that a command imports.

    Libraries that are not in the cache are built. An NCCL that is new for this torch is checked twice:

        before the build    that it declares all functions of NCCL that torch calls
        after the build     that its collectives compute the expected numbers, over sockets and over
                            emulated RDMA

    Args:
        command: The command with its arguments.
        environ: The environment of the command.
        nccl_source: Path of NCCL's source code (--nccl-source); None to search for it.
        on_progress: Shows the progress of the build.

    Raises:
        HolmesError: torch, a compiler or NCCL's source is missing, they do not fit each other, the build
            fails or the results of NCCL are wrong.
    """
    torch = find_torch(python_of(command, environ), environ)
    compiler = find_compiler()
    cache = cache_folder()
    require_own_cache(cache)
    source = find_nccl(nccl_source, cache, advised_nccl(torch))
    runtime = recipes.runtime(compiler, torch.cuda)
    operators = recipes.operators(compiler, torch)
    nccl_host = recipes.nccl_host(compiler, source, torch.cuda)
    nccl = recipes.nccl(compiler, source, torch.cuda, nccl_host)

    # This file marks that NCCL was checked with this build of torch.
    torch_digest = hashlib.sha256(torch.digest.encode()).hexdigest()
    checked = cache / nccl.folder / f"checked-{torch_digest[:16]}"
    if not checked.exists():
        check_functions(torch, source)
    # Another process may wait only for the runtime, so it is built first and its lock released.
    build([runtime], cache, on_progress)
    built = build([runtime, operators, nccl_host, nccl], cache, on_progress)
    libs = Libraries(
        torch,
        source,
        runtime=built["runtime"],
        operators=built["operators"],
        nccl=built["nccl"],
    )
    if not checked.exists():
        on_progress(0, 0, "trying NCCL's numbers")
        results = [check_numbers(libs, network) for network in ("Socket", "IB")]
        checked.write_text("\n".join(results) + "\n")
    return libs


def advised_nccl(torch: TorchBuild) -> str:
    """Return the NCCL version to recommend: torch's own if emulated GPUs support it, else the default."""
    for path in torch.folder.parent.glob("nvidia_nccl_cu*.dist-info"):
        version = path.name.split("-")[1]
        if version in TRIED:
            return version
    return DEFAULT


def check_functions(torch: TorchBuild, source: NcclSource) -> None:
    """Check that NCCL's headers declare all functions of NCCL that torch calls.

    Raises:
        HolmesError: A function is missing.
    """
    function_name = re.compile(r"\bnccl[A-Z]\w*")
    called: set[str] = set()
    for library in torch.folder.glob("lib/libtorch_*.so"):
        # nm prints the undefined symbols: the functions that torch expects in other libraries.
        completed = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True
        )
        called.update(function_name.findall(completed.stdout))
    src = source.folder / "src"
    declared: set[str] = set()
    for header in (src / "nccl.h.in", *src.glob("include/nccl_device/**/*.h")):
        declared.update(function_name.findall(header.read_text()))
    missing = sorted(called - declared)
    if missing:
        raise HolmesError(
            f"NCCL {source.name} lacks {', '.join(missing[:_MAX_NAMED_FUNCTIONS])}, which torch"
            f" {torch.version} calls; take newer source: git clone -b v{advised_nccl(torch)}-1 {REPOSITORY}"
        )


def check_numbers(libs: Libraries, network: str) -> str:
    """Run the program that checks the results of NCCL's collectives, and return its output.

    Args:
        libs: The libraries of the emulated GPU.
        network: NCCL's network for the check: "Socket" or "IB".

    Raises:
        HolmesError: A result is wrong, or the program does not end within CHECK_S seconds.
    """
    with tempfile.TemporaryDirectory() as directory:
        env = {
            **os.environ,
            **NCCL_SETTINGS,
            "LD_LIBRARY_PATH": f"{libs.runtime}:{libs.nccl}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_NET_PLUGIN": "none",
        }
        for name in _IGNORED_BY_CHECK:
            env.pop(name, None)
        if network == "IB":
            _write_loopback_hca(Path(directory))
            env["NCCL_NET_PLUGIN"] = str(libs.plugin)
            env["HOLMES_SYSFS"] = directory
            env["NCCL_NET"] = "IB"
        try:
            completed = subprocess.run(
                [libs.nccl / "nccl_check"], env=env, capture_output=True, text=True, timeout=CHECK_S
            )
            output = completed.stdout.strip() or completed.stderr.strip()
            status = completed.returncode
        except subprocess.TimeoutExpired:
            output = f"no end after {CHECK_S} s"
            status = 1
    if status:
        wrong_results = [line for line in output.splitlines() if line.startswith("wrong")]
        if wrong_results:
            problem = wrong_results[0]
        else:
            problem = output[-300:] or f"status {status}"
        raise HolmesError(
            f"NCCL {libs.source.name} does not fit the emulated GPU: {problem} (network {network}); take"
            f" the source of {', '.join(TRIED)}"
        )
    return f"{network}: {output}"


def _write_loopback_hca(sysfs: Path) -> None:
    """Write a sysfs tree with an InfiniBand adapter that uses the loopback device."""
    device = sysfs / "class" / "infiniband" / "mlx5_0"
    (device / "device" / "net" / "lo").mkdir(parents=True)
    (device / "ports" / "1").mkdir(parents=True)
    (device / "ports" / "1" / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (device / "ports" / "1" / "state").write_text("4: ACTIVE\n")
