"""Defines the components of the emulated GPU and the commands that build each of them.

    component    products                                            built from
    runtime      libcudart.so.MAJOR, libcuda.so.1, libnvidia-ml.so.1 csrc/runtime, csrc/driver
    operators    libholmes_operators.so                              csrc/operators, the installed torch
    nccl-host    libnccl_host.a: NCCL's unmodified host code         NCCL's source, csrc/include
    nccl         libnccl.so.2, libnccl-net-holmes.so, nccl_check     nccl-host, csrc/{nccl,net,check}

Each component has a digest of everything that determines its products: compiler, flags and source files.
A change therefore rebuilds only the components that depend on it.
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
from holmes_lab.gpu.nccl_source import NcclSource, digest_of_tree, write_generated_headers
from holmes_lab.gpu.torch_build import TorchBuild

CSRC = Path(__file__).with_name("csrc")
#: Placeholder in a build command for the file that the command writes.
OUTPUT = "{made}"
#: Placeholder in a build command for the folder of the component.
BUILD_FOLDER = "{here}"
#: Functions that csrc/nccl wraps with the linker's --wrap: three of NCCL, under their mangled C++ names (the
#: same in 2.27 to 2.30), and several of libc.
_WRAPPED_FUNCTIONS = (
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
#: Compiler flags that include the precompiled header first.h.
_INCLUDE_FIRST = ("-include", f"{BUILD_FOLDER}/first.h")
#: Linker flags of preloaded libraries: they must not bring a C++ library into the program.
_STATIC_CXX = (
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,--exclude-libs,libstdc++.a:libgcc.a:libgcc_eh.a",
)


@dataclass(frozen=True)
class BuildStep:
    """A command that builds one file of a component."""

    output: str  # path of the file in the component's folder
    argv: tuple[str, ...]  # may contain the placeholders OUTPUT and BUILD_FOLDER
    source_bytes: int = 0  # size of the source; the largest files are compiled first
    working_directory: Path = CSRC


@dataclass(frozen=True)
class BuildUnit:
    """A component of the emulated GPU and the steps that build it."""

    name: str
    digest: str
    products: tuple[str, ...]  # files that are kept after the build
    #: Returns the compilations, which may run in parallel. Argument: the component's folder.
    compilations: Callable[[Path], list[BuildStep]]
    #: Returns the links, which run in order after all compilations. Argument: component -> its folder.
    links: Callable[[dict[str, Path]], list[BuildStep]]
    #: Writes generated files into the component's folder, before anything is compiled.
    prepare: Callable[[Path], None] = field(default=lambda folder: None)
    #: Precompiles a header that all sources include, before they are compiled.
    header: BuildStep | None = None

    @property
    def folder(self) -> str:
        """Name of the component's folder in the cache."""
        return f"{self.name}-{self.digest[:16]}"


def runtime(compiler: Compiler, cuda: tuple[int, int]) -> BuildUnit:
    """Return the steps that build the emulated CUDA runtime, CUDA driver and NVML ("runtime").

    Args:
        compiler: The C++ compiler.
        cuda: Major and minor version of CUDA.
    """
    flags = (
        "-std=c++17",
        "-O2",
        "-g1",
        "-fPIC",
        "-Wall",
        "-Wextra",
        _cuda_version_flag(cuda),
        f"-I{CSRC}/include",
        f"-I{CSRC}/runtime",
    )
    cuda_major = str(cuda[0])
    cudart = f"libcudart.so.{cuda_major}"
    sources = sorted((CSRC / "runtime").glob("*.cc"))

    def prepare(folder: Path) -> None:
        """Write the linker's list of exported symbols for this major version of CUDA."""
        text = (CSRC / "runtime" / "exports.map").read_text()
        (folder / "exports.map").write_text(text.replace("MAJOR", cuda_major))

    def compilations(folder: Path) -> list[BuildStep]:
        return [_compile(compiler, source, flags) for source in sources]

    def links(built: dict[str, Path]) -> list[BuildStep]:
        """Return the commands that link three emulated libraries: CUDA runtime, CUDA driver, NVML."""
        exports = f"-Wl,--version-script={BUILD_FOLDER}/exports.map"
        cudart_arguments = [*_built_objects(sources), exports, "-lpthread", "-ldl"]
        linked_cudart = f"{BUILD_FOLDER}/{cudart}"
        return [
            _link(compiler, cudart, cudart_arguments),
            _link(compiler, "libcuda.so.1", [*flags, "driver/cuda.cc", linked_cudart]),
            _link(compiler, "libnvidia-ml.so.1", [*flags, "driver/nvml.cc", linked_cudart]),
        ]

    source_digest = digest_of_tree(CSRC, "runtime/*", "driver/*", "include/**/*")
    return BuildUnit(
        name="runtime",
        digest=_digest(compiler, flags, _STATIC_CXX, source_digest),
        products=(cudart, "libcuda.so.1", "libnvidia-ml.so.1"),
        compilations=compilations,
        links=links,
        prepare=prepare,
    )


def operators(compiler: Compiler, torch_build: TorchBuild) -> BuildUnit:
    """Return the steps that build CPU kernels for torch's CUDA operators ("operators").

    Args:
        compiler: The C++ compiler.
        torch_build: The installed torch: its folder, and the version of CUDA that it was built for.
    """
    headers = torch_build.folder / "include"
    cuda_major, _ = torch_build.cuda
    flags = (
        "-std=c++20",
        "-O1",
        "-g1",
        "-fPIC",
        "-w",
        _cuda_version_flag(torch_build.cuda),
        f"-I{CSRC}/include",
        f"-I{CSRC}/runtime",
        f"-isystem{headers}",
        f"-isystem{headers}/torch/csrc/api/include",
    )
    sources = sorted((CSRC / "operators").glob("*.cc"))

    def prepare(folder: Path) -> None:
        _write_first_header(folder, CSRC / "operators" / "operators.h")

    def compilations(folder: Path) -> list[BuildStep]:
        return [_compile(compiler, source, (*flags, *_INCLUDE_FIRST)) for source in sources]

    def links(built: dict[str, Path]) -> list[BuildStep]:
        """Return the command that links the CPU kernels of torch's CUDA operators into a library.

        `built` maps the name of each component to the folder with its built files.
        """
        cudart = built["runtime"] / f"libcudart.so.{cuda_major}"
        arguments = [
            *_built_objects(sources),
            f"-L{torch_build.folder}/lib",
            "-ltorch",
            "-ltorch_cpu",
            "-ltorch_cuda",
            "-lc10",
            "-lc10_cuda",
            str(cudart),
        ]
        # The library exchanges C++ objects with torch, so it must use torch's C++ library.
        return [_link(compiler, "libholmes_operators.so", arguments, static_cxx=False)]

    source_digest = digest_of_tree(CSRC, "operators/*", "runtime/*.h", "include/**/*")
    return BuildUnit(
        name="operators",
        digest=_digest(
            compiler, flags, torch_build.digest, source_digest, outside=torch_build.folder
        ),
        products=("libholmes_operators.so",),
        compilations=compilations,
        links=links,
        prepare=prepare,
        header=_precompile_first_header(compiler, flags),
    )


def _nccl_flags(source: NcclSource, cuda: tuple[int, int]) -> tuple[str, ...]:
    """Return the compiler flags for NCCL's source files.

    They are those of NCCL's makefiles/common.mk, without the ones that need a library of NVIDIA or InfiniBand
    at build time.
    """
    src = source.folder / "src"
    doca_flags = []
    for path in sorted(src.glob("**/doca-gpunetio/*")):
        if path.name in ("include", "src"):
            doca_flags.append(f"-I{path}")
    cuda_major, cuda_minor = cuda
    return (
        "-std=c++17",
        "-fPIC",
        "-fvisibility=hidden",
        "-w",
        _cuda_version_flag(cuda),
        f"-DCUDA_MAJOR={cuda_major}",
        f"-DCUDA_MINOR={cuda_minor}",
        "-DNVTX_DISABLE",
        "-DNCCL_OS_LINUX",
        "-DPROFAPI",
        "-DNCCL_GIN_PROXY_ENABLE=1",
        "-DDOCA_VERBS_USE_CUDA_WRAPPER",
        "-DDOCA_VERBS_USE_NET_WRAPPER",
        f"-I{CSRC}/include",
        f"-I{BUILD_FOLDER}/include",
        f"-I{src}",
        f"-I{src}/include",
        f"-I{src}/include/plugin",
        f"-I{src}/include/nccl_device",
        *doca_flags,
    )


def nccl_host(compiler: Compiler, source: NcclSource, cuda: tuple[int, int]) -> BuildUnit:
    """Return the steps that build NCCL's unmodified host code as a static library ("nccl-host").

    Args:
        compiler: The C++ compiler.
        source: NCCL's source code.
        cuda: Major and minor version of CUDA.
    """
    flags = (*_nccl_flags(source, cuda), "-O0")
    src = source.folder / "src"
    files = _nccl_host_files(src)

    def prepare(folder: Path) -> None:
        write_generated_headers(source, folder)
        _write_first_header(folder, src / "include" / "comm.h")

    def compilations(folder: Path) -> list[BuildStep]:
        """Return the commands that compile NCCL's host code."""
        steps = []
        for file in files:
            # DOCA's .cpp files declare the same names as CUDA's headers in the precompiled comm.h.
            include_first = _INCLUDE_FIRST if file.suffix == ".cc" else ()
            steps.append(_compile(compiler, file, (*flags, *include_first), base=src))
        return steps

    def links(built: dict[str, Path]) -> list[BuildStep]:
        archive = ("ar", "rcs", OUTPUT, *_built_objects(files, base=src))
        return [BuildStep("libnccl_host.a", archive)]

    digest = _digest(
        compiler,
        flags,
        source.digest,
        files,
        digest_of_tree(CSRC, "include/**/*"),
        outside=source.folder,
    )
    return BuildUnit(
        name="nccl-host",
        digest=digest,
        products=("libnccl_host.a",),
        compilations=compilations,
        links=links,
        prepare=prepare,
        header=_precompile_first_header(compiler, flags),
    )


def _nccl_host_files(src: Path) -> list[Path]:
    """Return the source files of NCCL's host code for Linux, below the folder `src`.

    They are those that NCCL's Makefile compiles into libnccl.so, without the device code.
    """
    # device: csrc/nccl replaces it. windows: for another system, as other files with this word.
    other_folders = {"device", "windows"}
    # Two programs, and enhcompat.cc, which NCCL needs only with a static CUDA runtime.
    not_in_library = {"ras/client.cc", "param/ncclparam.cc", "enhcompat.cc"}
    names = [path.relative_to(src) for path in src.glob("**/doca-gpunetio/src/*.cpp")]
    for path in src.rglob("*.cc"):
        name = path.relative_to(src)
        if name.parts[0] in other_folders or "windows" in name.name:
            continue
        # Some versions have files *_stub.cc, for builds without a part that is compiled here.
        if str(name) in not_in_library or name.stem.endswith("_stub"):
            continue
        names.append(name)
    return [src / name for name in sorted(names)]


def nccl(
    compiler: Compiler, source: NcclSource, cuda: tuple[int, int], host_code: BuildUnit
) -> BuildUnit:
    """Return the steps that build NCCL for emulated GPUs, its network plugin and its check ("nccl").

    Args:
        compiler: The C++ compiler.
        source: NCCL's source code.
        cuda: Major and minor version of CUDA.
        host_code: The component "nccl-host". It is linked into the library.
    """
    src = source.folder / "src"
    cuda_major, _ = cuda
    cudart_name = f"libcudart.so.{cuda_major}"
    flags = (
        *_nccl_flags(source, cuda),
        "-O2",
        "-march=native",
        f"-I{CSRC}/nccl",
        f"-I{CSRC}/runtime",
        f"-I{src}/device",
        f"-I{BUILD_FOLDER}/generated",
    )
    library_sources = [*sorted((CSRC / "nccl").glob("*.cc")), CSRC / "runtime" / "text.cc"]
    plugin_sources = sorted((CSRC / "net").glob("*.cc"))
    check_source = CSRC / "check" / "nccl_check.cc"

    def prepare(folder: Path) -> None:
        write_generated_headers(source, folder)
        _generate_device_sources(source, folder / "generated")

    def generated_sources(folder: Path) -> list[Path]:
        return sorted((folder / "generated").glob("**/*.cc"))

    def compilations(folder: Path) -> list[BuildStep]:
        """Return the commands that compile NCCL's device code, its network plugin, and the check.

        Generated sources of the device code are in `folder`, the folder of the component. All others are in
        csrc. NCCL's host code is another component ("nccl-host").
        """
        steps = [_compile(compiler, file, flags, base=folder) for file in generated_sources(folder)]
        for file in (*library_sources, *plugin_sources, check_source):
            steps.append(_compile(compiler, file, flags))
        return steps

    def links(built: dict[str, Path]) -> list[BuildStep]:
        """Return the commands that link NCCL, its network plugin and the program that checks its results.

        `built` maps the name of each component to the folder with its built files.
        """
        folder = built["nccl"]
        system_libraries = [str(built["runtime"] / cudart_name), "-lpthread", "-lrt", "-ldl"]
        host_archive = built[host_code.name] / "libnccl_host.a"
        # NCCL's list of the symbols to export, in the versions of NCCL that have one.
        version_scripts = [f"-Wl,--version-script={file}" for file in src.glob("libnccl.map")]
        library_arguments = [
            *_built_objects(library_sources),
            *_built_objects(generated_sources(folder), base=folder),
            # The linker would otherwise leave out files with functions that only programs call.
            "-Wl,--whole-archive",
            str(host_archive),
            "-Wl,--no-whole-archive",
            # Calls of these functions in NCCL go to csrc/nccl: it records launches of kernels, lets
            # threads sleep while they poll, and delays the use of memory until it is written.
            *(f"-Wl,--wrap={name}" for name in _WRAPPED_FUNCTIONS),
            *version_scripts,
            "-Wl,--no-undefined",
            *system_libraries,
        ]
        check_argv = (
            *compiler.command,
            *_built_objects([check_source]),
            "-o",
            OUTPUT,
            f"{BUILD_FOLDER}/libnccl.so.2",
            *system_libraries,
        )
        return [
            _link(compiler, "libnccl.so.2", library_arguments),
            _link(compiler, "libnccl-net-holmes.so", _built_objects(plugin_sources)),
            BuildStep("nccl_check", check_argv),
        ]

    digest = _digest(
        compiler,
        flags,
        host_code.digest,
        _STATIC_CXX,
        _WRAPPED_FUNCTIONS,
        digest_of_tree(CSRC, "nccl/*", "net/*", "check/*", "runtime/*", "include/**/*"),
        outside=source.folder,
    )
    return BuildUnit(
        name="nccl",
        digest=digest,
        products=("libnccl.so.2", "libnccl-net-holmes.so", "nccl_check"),
        compilations=compilations,
        links=links,
        prepare=prepare,
    )


def _generate_device_sources(source: NcclSource, folder: Path) -> None:
    """Generate the sources of NCCL's device code that depend on its version, into `folder`.

    Raises:
        HolmesError: NCCL's own generators fail.
    """
    script = CSRC / "nccl" / "generate.py"
    completed = subprocess.run(
        [sys.executable, script, source.folder / "src", folder], capture_output=True, text=True
    )
    if completed.returncode:
        message = " ".join(completed.stderr.split())
        raise HolmesError(f"NCCL {source.name}: its generators fail: {message[-300:]}")


def _cuda_version_flag(cuda: tuple[int, int]) -> str:
    """Return the flag that defines CUDART_VERSION, such as 13020 for CUDA 13.2."""
    major, minor = cuda
    return f"-DCUDART_VERSION={1000 * major + 10 * minor}"


def _object(source: Path, base: Path = CSRC) -> str:
    """Return the path of a source's object file in the component's folder.

    Args:
        source: The source file.
        base: Folder above the source; the path below it becomes the object's name.
    """
    name = str(source.relative_to(base)).replace("/", "_")
    return f"objects/{name}.o"


def _built_objects(sources: Sequence[Path], base: Path = CSRC) -> list[str]:
    """Return the paths of the sources' object files, as arguments of a link command."""
    return [f"{BUILD_FOLDER}/{_object(source, base)}" for source in sources]


def _compile(
    compiler: Compiler, source: Path, flags: Sequence[str], base: Path = CSRC
) -> BuildStep:
    """Return the step that compiles a source file in the working directory `base`."""
    return BuildStep(
        output=_object(source, base),
        argv=(*compiler.command, *flags, "-c", str(source), "-o", OUTPUT),
        source_bytes=source.stat().st_size,
        working_directory=base,
    )


def _write_first_header(folder: Path, header: Path) -> None:
    """Write first.h, a header that includes `header` and is precompiled for all sources of a component.

    Without it, half of the time of each compilation would be spent on reading that header.
    """
    (folder / "first.h").write_text(f'#include "{header}"\n')


def _precompile_first_header(compiler: Compiler, flags: Sequence[str]) -> BuildStep:
    source = f"{BUILD_FOLDER}/first.h"
    argv = (*compiler.command, *flags, "-x", "c++-header", source, "-o", OUTPUT)
    return BuildStep("first.h.gch", argv)


def _link(
    compiler: Compiler, soname: str, arguments: Sequence[str], *, static_cxx: bool = True
) -> BuildStep:
    """Return the step that links a shared library.

    Args:
        compiler: The C++ compiler.
        soname: Name of the library and of its file.
        arguments: Object files, libraries and further flags.
        static_cxx: Links the C++ library statically, for a library that is preloaded into any program.
    """
    argv = [*compiler.command, "-shared", "-o", OUTPUT, f"-Wl,-soname,{soname}", *arguments]
    if static_cxx:
        argv.extend(_STATIC_CXX)
    return BuildStep(soname, tuple(argv))


def _digest(*parts: object, outside: Path | None = None) -> str:
    """Return the SHA-256 digest (hex) of the parts' texts.

    Args:
        parts: Objects whose texts determine the products of a component.
        outside: Folder of torch or NCCL. Its path and that of csrc are replaced by fixed words, so that the
            digest does not depend on where the folders lie.
    """
    text = "\0".join(map(str, parts)).replace(str(CSRC), "csrc")
    if outside:
        text = text.replace(str(outside), "outside")
    return hashlib.sha256(text.encode()).hexdigest()
