"""What a job on emulated GPUs is started with: libraries for the torch of its command, built or found in the
cache."""

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
from holmes_lab.gpu.build import OnProgress, build, cache_folder
from holmes_lab.gpu.compiler import find_compiler
from holmes_lab.gpu.nccl_source import DEFAULT, REPOSITORY, TRIED, NcclSource, find_nccl
from holmes_lab.gpu.torch_build import TorchBuild, find_torch, python_of

CHECK_S = 600
_NOT_FOR_CHECK = (
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "CUDA_VISIBLE_DEVICES",
    "HOLMES_GPU_WATCH",
    "RANK",
)
#: For NCCL on emulated GPUs whoever runs it: how NCCL would search for what is not emulated, and its memory.
NCCL_SETTINGS = {
    "NCCL_PAT_ENABLE": "0",  # an algorithm whose device side is not emulated
    "NCCL_LOCAL_REGISTER": "0",  # registered buffers: likewise
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_NVLS_ENABLE": "0",  # no NVLink
    "NCCL_LL128_BUFFSIZE": "262144",  # of each connection 5 MB of this machine's memory otherwise
    "NCCL_NET_PLUGIN_REF_COUNT": "1",  # 2.29 cannot load a plugin of others a second time
}


@dataclass(frozen=True)
class Libraries:
    """runtime, operators, nccl: their folders in the cache."""

    torch: TorchBuild
    source: NcclSource
    runtime: Path
    operators: Path
    nccl: Path

    @property
    def preload(self) -> tuple[Path, ...]:
        """What LD_PRELOAD names: nothing else goes before the path inside torch that leads to its own
        libraries."""
        cuda = (f"libcudart.so.{self.torch.cuda[0]}", "libcuda.so.1", "libnvidia-ml.so.1")
        return (*(self.runtime / name for name in cuda), self.nccl / "libnccl.so.2")

    @property
    def plugin(self) -> Path:
        return self.nccl / LAB_PLUGIN

    @property
    def hook(self) -> Path:
        """What is loaded when a program imports torch."""
        return self.operators / "libholmes_operators.so"


def libraries(
    command: Sequence[str],
    environ: Mapping[str, str],
    nccl_source: str | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> Libraries:
    """For the torch that `command` imports in `environ`. nccl_source: --nccl-source. Builds what the cache
    lacks, and tries NCCL's numbers once for each build. HolmesError in one line where something is missing or
    does not fit."""
    torch, compiler, cache = (
        find_torch(python_of(command, environ), environ),
        find_compiler(),
        cache_folder(),
    )
    source = find_nccl(nccl_source, cache, advised_nccl(torch))
    host = recipes.nccl_host(compiler, source, torch.cuda)
    parts = (
        recipes.runtime(compiler, torch.cuda),
        recipes.operators(compiler, torch),
        host,
        recipes.nccl(compiler, source, torch.cuda, host),
    )
    mark = f"checked-{hashlib.sha256(torch.digest.encode()).hexdigest()[:16]}"
    checked = cache / parts[3].folder / mark
    if not checked.exists():
        check_functions(torch, source)
    build(parts[:1], cache, on_progress)  # soon there for whoever waits for it alone
    built = build(parts, cache, on_progress)
    libs = Libraries(torch, source, built["runtime"], built["operators"], built["nccl"])
    if not checked.exists():
        on_progress(0, 0, "trying NCCL's numbers")
        results = [check_numbers(libs, network) for network in ("Socket", "IB")]
        checked.write_text("\n".join(results) + "\n")
    return libs


def advised_nccl(torch: TorchBuild) -> str:
    """Return the version of NCCL that is installed with torch if it was tried, else the default version."""
    installed = [
        path.name.split("-")[1] for path in torch.folder.parent.glob("nvidia_nccl_cu*.dist-info")
    ]
    return next((version for version in installed if version in TRIED), DEFAULT)


def check_functions(torch: TorchBuild, source: NcclSource) -> None:
    """HolmesError where torch calls functions that this NCCL's headers do not name."""
    needed: set[str] = set()
    for library in torch.folder.glob("lib/libtorch_*.so"):
        done = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True
        )
        needed |= set(re.findall(r"\bnccl[A-Z]\w*", done.stdout))
    src = source.folder / "src"
    headers = [
        path.read_text() for path in (src / "nccl.h.in", *src.glob("include/nccl_device/**/*.h"))
    ]
    missing = sorted(needed.difference(re.findall(r"\bnccl[A-Z]\w*", "\n".join(headers))))
    if missing:
        raise HolmesError(
            f"NCCL {source.name} lacks {', '.join(missing[:3])}, which torch {torch.version} calls; take"
            f" newer source: git clone -b v{advised_nccl(torch)}-1 {REPOSITORY}"
        )


def check_numbers(libs: Libraries, network: str) -> str:
    """Runs csrc/check over one network; returns what it prints. HolmesError where a number is wrong, or it
    hangs."""
    with tempfile.TemporaryDirectory() as directory:
        env = {
            **os.environ,
            **NCCL_SETTINGS,
            "LD_LIBRARY_PATH": f"{libs.runtime}:{libs.nccl}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_NET_PLUGIN": "none",
        }
        for name in _NOT_FOR_CHECK:
            env.pop(name, None)
        if network == "IB":
            _loopback_hca(Path(directory))
            env |= {
                "NCCL_NET_PLUGIN": str(libs.plugin),
                "HOLMES_SYSFS": directory,
                "NCCL_NET": "IB",
            }
        try:
            done = subprocess.run(
                [libs.nccl / "nccl_check"], env=env, capture_output=True, text=True, timeout=CHECK_S
            )
            output, status = done.stdout.strip() or done.stderr.strip(), done.returncode
        except subprocess.TimeoutExpired:
            output, status = f"no end after {CHECK_S} s", 1
    if status:
        lines = [line for line in output.splitlines() if line.startswith("wrong")]
        wrong = lines[0] if lines else output[-300:] or f"status {status}"
        raise HolmesError(
            f"NCCL {libs.source.name} does not fit the emulated GPU: {wrong} (network {network}); take"
            f" the source of {', '.join(TRIED)}"
        )
    return f"{network}: {output}"


def _loopback_hca(root: Path) -> None:
    """An HCA over the loopback device, as a sysfs tree."""
    device = root / "class" / "infiniband" / "mlx5_0"
    (device / "device" / "net" / "lo").mkdir(parents=True)
    (device / "ports" / "1").mkdir(parents=True)
    (device / "ports" / "1" / "rate").write_text("200 Gb/sec (4X HDR)\n")
    (device / "ports" / "1" / "state").write_text("4: ACTIVE\n")
