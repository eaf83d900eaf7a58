"""What the emulated GPU consists of, and the commands that build it.

    runtime      libcudart.so.MAJOR, libcuda.so.1, libnvidia-ml.so.1     csrc/runtime, csrc/driver
    operators    libholmes_operators.so                                  csrc/operators, against
                                                                         the installed torch
    nccl-host    NCCL's host code, compiled as it is                     the checkout, csrc/include
    nccl         libnccl.so.2, libnccl-net-holmes.so, nccl_check         nccl-host, csrc/nccl, csrc/net

Each component has a digest of all that decides what comes out, so a change rebuilds what depends on it and no
more.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_lab.gpu.compiler import Compiler
from holmes_lab.gpu.nccl_source import NcclSource, digest_of_tree
from holmes_lab.gpu.torch_build import TorchBuild

CSRC = Path(__file__).with_name("csrc")
#: In a command: the file that it makes, the component's folder while it is built.
MADE, HERE = "{made}", "{here}"
#: Functions that csrc/nccl stands around: of NCCL, as the compiler writes their signatures (2.27 to 2.30),
#: and of libc.
_WRAPPED = (
    "_Z16ncclLaunchKernelP8ncclCommP14ncclKernelPlan",
    "_Z17ncclTopoTuneModelP8ncclCommiiPP13ncclTopoGraph",
    "_Z13bootstrapRecvPviiS_i",
    "sched_yield",
    "recv",
    "send",
    "accept",
    "malloc",
    "free",
    "memset",
)
_FIRST = ("-include", f"{HERE}/first.h")
# What is loaded before a program brings no C++ library of its own into it.
_STANDALONE = (
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,--exclude-libs,libstdc++.a:libgcc.a:libgcc_eh.a",
)


@dataclass(frozen=True)
class BuildStep:
    """One command. makes: a file of the component's folder; weight: bytes of its source, to begin with the
    longest."""

    makes: str
    argv: tuple[str, ...]
    weight: int = 0
    where: Path = CSRC


@dataclass(frozen=True)
class BuildUnit:
    """prepare(folder) writes what is generated; header: compiled first, for all that includes it;
    compiles(folder) are the commands after that, in any order; links(built) those after all of them, in
    order, built: component -> its folder; products: what is kept."""

    name: str
    digest: str
    products: tuple[str, ...]
    compiles: Callable[[Path], list[BuildStep]]
    links: Callable[[dict[str, Path]], list[BuildStep]]
    prepare: Callable[[Path], None] = field(default=lambda folder: None)
    header: BuildStep | None = None

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.digest[:16]}"


def runtime(compiler: Compiler, cuda: tuple[int, int]) -> BuildUnit:
    flags = (
        "-std=c++17",
        "-O2",
        "-g1",
        "-fPIC",
        "-Wall",
        "-Wextra",
        *_version(cuda),
        f"-I{CSRC}/include",
        f"-I{CSRC}/runtime",
    )
    cudart, sources = f"libcudart.so.{cuda[0]}", sorted((CSRC / "runtime").glob("*.cc"))

    def prepare(folder: Path) -> None:
        text = (CSRC / "runtime" / "exports.map").read_text()
        (folder / "exports.map").write_text(text.replace("MAJOR", str(cuda[0])))

    def compiles(folder: Path) -> list[BuildStep]:
        return [_compile(compiler, source, flags) for source in sources]

    def links(built: dict[str, Path]) -> list[BuildStep]:
        objects = [f"{HERE}/{_object(source)}" for source in sources]
        exports = f"-Wl,--version-script={HERE}/exports.map"
        steps = [_link(compiler, cudart, [*objects, exports, "-lpthread", "-ldl"])]
        for soname, source in (
            ("libcuda.so.1", "driver/cuda.cc"),
            ("libnvidia-ml.so.1", "driver/nvml.cc"),
        ):
            steps.append(_link(compiler, soname, [*flags, source, f"{HERE}/{cudart}"]))
        return steps

    digest = _digest(
        compiler, flags, _STANDALONE, digest_of_tree(CSRC, "runtime/*", "driver/*", "include/**/*")
    )
    return BuildUnit(
        "runtime", digest, (cudart, "libcuda.so.1", "libnvidia-ml.so.1"), compiles, links, prepare
    )


def operators(compiler: Compiler, torch: TorchBuild) -> BuildUnit:
    headers = torch.folder / "include"
    flags = (
        "-std=c++20",
        "-O1",
        "-g1",
        "-fPIC",
        "-w",
        *_version(torch.cuda),
        f"-I{CSRC}/include",
        f"-I{CSRC}/runtime",
        f"-isystem{headers}",
        f"-isystem{headers}/torch/csrc/api/include",
    )
    sources = sorted((CSRC / "operators").glob("*.cc"))

    def compiles(folder: Path) -> list[BuildStep]:
        return [_compile(compiler, source, (*flags, *_FIRST)) for source in sources]

    def links(built: dict[str, Path]) -> list[BuildStep]:
        libraries = [
            f"-l{name}" for name in ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")
        ]
        cudart = built["runtime"] / f"libcudart.so.{torch.cuda[0]}"
        objects = [f"{HERE}/{_object(source)}" for source in sources]
        return [
            _link(
                compiler,
                "libholmes_operators.so",
                [*objects, f"-L{torch.folder}/lib", *libraries, str(cudart)],
                standalone=False,
            )
        ]

    digest = _digest(
        compiler,
        flags,
        torch.digest,
        digest_of_tree(CSRC, "operators/*", "runtime/*.h", "include/**/*"),
        outside=torch.folder,
    )
    return BuildUnit(
        "operators",
        digest,
        ("libholmes_operators.so",),
        compiles,
        links,
        lambda folder: _write_first(folder, CSRC / "operators" / "operators.h"),
        _precompile(compiler, flags),
    )


def _nccl_flags(source: NcclSource, cuda: tuple[int, int]) -> tuple[str, ...]:
    """As in its makefiles/common.mk, without what needs NVIDIA's or InfiniBand's libraries when it is
    built."""
    src = source.folder / "src"
    doca = [
        f"-I{path}"
        for path in sorted(src.glob("**/doca-gpunetio/*"))
        if path.name in ("include", "src")
    ]
    return (
        "-std=c++17",
        "-fPIC",
        "-fvisibility=hidden",
        "-w",
        *_version(cuda),
        f"-DCUDA_MAJOR={cuda[0]}",
        f"-DCUDA_MINOR={cuda[1]}",
        "-DNVTX_DISABLE",
        "-DNCCL_OS_LINUX",
        "-DPROFAPI",
        "-DNCCL_GIN_PROXY_ENABLE=1",
        "-DDOCA_VERBS_USE_CUDA_WRAPPER",
        "-DDOCA_VERBS_USE_NET_WRAPPER",
        f"-I{CSRC}/include",
        f"-I{HERE}/include",
        f"-I{src}",
        f"-I{src}/include",
        f"-I{src}/include/plugin",
        f"-I{src}/include/nccl_device",
        *doca,
    )


def _write_headers(source: NcclSource, folder: Path) -> None:
    """What its Makefile makes of nccl.h.in."""
    (folder / "include").mkdir(exist_ok=True)
    text = (source.folder / "src" / "nccl.h.in").read_text()
    values = dict(
        zip(("Major", "Minor", "Patch"), map(str, source.version)), Suffix="", Version=source.code
    )
    for name, value in values.items():
        text = text.replace(f"${{nccl:{name}}}", value)
    (folder / "include" / "nccl.h").write_text(text)
    (folder / "include" / "nccl_git_version.h").write_text(
        '#define NCCL_GIT_BRANCH ""\n#define NCCL_GIT_COMMIT_HASH ""\n'
    )


def nccl_host(compiler: Compiler, source: NcclSource, cuda: tuple[int, int]) -> BuildUnit:
    flags, src = (*_nccl_flags(source, cuda), "-O0"), source.folder / "src"
    others = {"device", "windows"}  # the device side is ours
    programs = {"ras/client.cc", "param/ncclparam.cc", "enhcompat.cc"}
    names = [path.relative_to(src) for path in src.rglob("*.cc")]
    names = [
        name
        for name in names
        if name.parts[0] not in others
        and str(name) not in programs
        and "windows" not in name.name
        and not name.stem.endswith("_stub")
    ]
    names += [path.relative_to(src) for path in src.glob("**/doca-gpunetio/src/*.cpp")]
    files = [src / name for name in sorted(names)]

    def compiles(folder: Path) -> list[BuildStep]:
        return [
            _compile(compiler, file, (*flags, *(_FIRST if file.suffix == ".cc" else ())), src)
            for file in files
        ]  # those of DOCA declare what comm.h has from CUDA's headers

    def prepare(folder: Path) -> None:
        _write_headers(source, folder)
        _write_first(folder, src / "include" / "comm.h")

    def links(built: dict[str, Path]) -> list[BuildStep]:
        return [
            BuildStep(
                "libnccl_host.a",
                ("ar", "rcs", MADE, *(f"{HERE}/{_object(file, src)}" for file in files)),
            )
        ]

    digest = _digest(
        compiler,
        flags,
        source.digest,
        files,
        digest_of_tree(CSRC, "include/**/*"),
        outside=source.folder,
    )
    return BuildUnit(
        "nccl-host",
        digest,
        ("libnccl_host.a",),
        compiles,
        links,
        prepare,
        _precompile(compiler, flags),
    )


def nccl(
    compiler: Compiler, source: NcclSource, cuda: tuple[int, int], host: BuildUnit
) -> BuildUnit:
    """host: nccl_host's, which is linked into it."""
    src, cudart = source.folder / "src", f"libcudart.so.{cuda[0]}"
    flags = (
        *_nccl_flags(source, cuda),
        "-O2",
        "-march=native",
        f"-I{CSRC}/nccl",
        f"-I{CSRC}/runtime",
        f"-I{src}/device",
        f"-I{HERE}/generated",
    )
    library = [*sorted((CSRC / "nccl").glob("*.cc")), CSRC / "runtime" / "text.cc"]
    plugin, check = sorted((CSRC / "net").glob("*.cc")), [CSRC / "check" / "nccl_check.cc"]

    def prepare(folder: Path) -> None:
        _write_headers(source, folder)
        done = subprocess.run(
            [sys.executable, CSRC / "nccl" / "generate.py", src, folder / "generated"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise HolmesError(
                f"NCCL {source.name}: its generators fail: {' '.join(done.stderr.split())[-300:]}"
            )

    def generated(folder: Path) -> list[Path]:
        return sorted((folder / "generated").glob("**/*.cc"))

    def compiles(folder: Path) -> list[BuildStep]:
        steps = [_compile(compiler, file, flags, folder) for file in generated(folder)]
        return steps + [_compile(compiler, file, flags) for file in (*library, *plugin, *check)]

    def links(built: dict[str, Path]) -> list[BuildStep]:
        objects = [f"{HERE}/{_object(file)}" for file in library]
        objects += [f"{HERE}/{_object(file, built['nccl'])}" for file in generated(built["nccl"])]
        whole = [
            "-Wl,--whole-archive",
            str(built[host.name] / "libnccl_host.a"),
            "-Wl,--no-whole-archive",
        ]
        wraps = [f"-Wl,--wrap={name}" for name in _WRAPPED]
        exports = [f"-Wl,--version-script={file}" for file in src.glob("libnccl.map")]
        system = [str(built["runtime"] / cudart), "-lpthread", "-lrt", "-ldl"]
        checked = (f"{HERE}/{_object(check[0])}", "-o", MADE, f"{HERE}/libnccl.so.2", *system)
        return [
            _link(
                compiler,
                "libnccl.so.2",
                [*objects, *whole, *wraps, *exports, "-Wl,--no-undefined", *system],
            ),
            _link(
                compiler, "libnccl-net-holmes.so", [f"{HERE}/{_object(file)}" for file in plugin]
            ),
            BuildStep("nccl_check", (*compiler.command, *checked)),
        ]

    digest = _digest(
        compiler,
        flags,
        host.digest,
        _STANDALONE,
        _WRAPPED,
        digest_of_tree(CSRC, "nccl/*", "net/*", "check/*", "runtime/*", "include/**/*"),
        outside=source.folder,
    )
    return BuildUnit(
        "nccl",
        digest,
        ("libnccl.so.2", "libnccl-net-holmes.so", "nccl_check"),
        compiles,
        links,
        prepare,
    )


def _version(cuda: tuple[int, int]) -> tuple[str]:
    return (f"-DCUDART_VERSION={1000 * cuda[0] + 10 * cuda[1]}",)


def _object(source: Path, base: Path = CSRC) -> str:
    return "objects/" + str(source.relative_to(base)).replace("/", "_") + ".o"


def _compile(
    compiler: Compiler, source: Path, flags: Sequence[str], base: Path = CSRC
) -> BuildStep:
    argv = (*compiler.command, *flags, "-c", str(source), "-o", MADE)
    return BuildStep(_object(source, base), argv, source.stat().st_size, base)


def _write_first(folder: Path, header: Path) -> None:
    """The header that all sources of a component begin with, and that is compiled once: reading it is half of
    a compilation."""
    (folder / "first.h").write_text(f'#include "{header}"\n')


def _precompile(compiler: Compiler, flags: Sequence[str]) -> BuildStep:
    header = ("-x", "c++-header", f"{HERE}/first.h", "-o", MADE)
    return BuildStep("first.h.gch", (*compiler.command, *flags, *header))


def _link(
    compiler: Compiler, soname: str, arguments: Sequence[str], standalone: bool = True
) -> BuildStep:
    flags = _STANDALONE if standalone else ()
    return BuildStep(
        soname,
        (*compiler.command, "-shared", "-o", MADE, f"-Wl,-soname,{soname}", *arguments, *flags),
    )


def _digest(*parts: object, outside: Path | None = None) -> str:
    """Of all parts, wherever holmes and `outside` lie."""
    text = "\0".join(map(str, parts)).replace(str(CSRC), "csrc")
    return hashlib.sha256(
        (text.replace(str(outside), "outside") if outside else text).encode()
    ).hexdigest()
