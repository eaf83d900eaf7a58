"""Tests wrong uses of `holmes lab run --gpu`, which runs a training job on emulated GPUs.

For each mistake the command prints one line that says what to do, and exits with status 2.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile

import pytest
from holmes_lab.cli.lab_gpu import find_missing_emulation, killed_for_memory
from holmes_lab.gpu import compiler, job, libraries, nccl_source, torch_build
from holmes_lab.gpu.job import GpuClock, Gpus, parse_clock, visible
from holmes_lab.process.job import RunResult

from holmes_ext.cli.main import main
from holmes_ext.errors import HolmesError
from holmes_ext.samples import examples

CLUSTER = str(examples() / "clusters" / "two_clusters_4.toml")
TORCH = "__version__ = '{}'\ncuda: str | None = {!r}\ngit_version = 'abc'\n"


@pytest.fixture
def refused(capsys):
    """Return a function that runs holmes with wrong arguments and returns its one line of error output.

    The function asserts that holmes exits with status 2.
    """

    def run(*words: str) -> str:
        assert main(list(words)) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1, printed.err
        assert printed.err.startswith("holmes: "), printed.err
        return printed.err

    return run


def lab_run(*options: str) -> list[str]:
    return ["lab", "run", "--cluster", CLUSTER, *options, "--", sys.executable, "train.py"]


@pytest.mark.parametrize(
    "options, said",
    [
        (["--gpu", "0"], "--gpu 0: a node needs at least 1 GPU"),
        (["--gpu", "-3"], "--gpu -3: a node needs at least 1 GPU"),
        (["--gpu", "--gpu-memory", "8"], "is not a size"),
        (["--gpu", "--gpu-memory", "1MB"], "--gpu-memory 1MB: NCCL and torch alone need 64 MB"),
        (["--gpu", "--accelerator", "{"], "--accelerator"),
        (["--gpu", "--accelerator", '{"flop": 1}'], "flop"),
        (
            ["--gpu", "--accelerator", '{"sms": 0}'],
            "key 'sms': 0 multiprocessors; it must be 1 to 1024",
        ),
        (
            ["--gpu", "--launcher", "srun"],
            "--gpu: the ranks of --launcher srun find no emulated GPUs",
        ),
        (["--gpu-memory", "8GB"], "--gpu-memory is for emulated GPUs; add --gpu"),
        (["--gpu-order", "random"], "--gpu-order is for emulated GPUs; add --gpu"),
        (["--gpu-report", "x.json"], "--gpu-report is for emulated GPUs; add --gpu"),
        (["--gpu-standstill", "9"], "--gpu-standstill is for emulated GPUs; add --gpu"),
        (["--gpu", "--gpu-standstill", "0"], "--gpu-standstill 0: seconds, more than 0"),
        (["--beside-stock"], "--beside-stock is for emulated GPUs; add --gpu"),
    ],
)
def test_options_that_make_no_sense(refused, options, said):
    assert said in refused(*lab_run(*options))


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        HolmesError, match=r"no-such-compiler, which is missing: apt-get install g\+\+"
    ):
        compiler.find_compiler()


@pytest.mark.parametrize(
    "body, said",
    [
        (
            "echo 'g++ (Debian 9.4.0) 9.4.0'",
            "the emulated GPU needs g\\+\\+ 10 or newer; name one in CXX",
        ),
        ("echo 'broken pipe dreams' >&2; exit 1", "fails: broken pipe dreams"),
    ],
)
def test_a_compiler_that_will_not_do(tmp_path, monkeypatch, body, said):
    (tmp_path / "g++").write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    with pytest.raises(HolmesError, match=said):
        compiler.find_compiler()


def nccl_checkout(folder, version="2.29.7"):
    (folder / "makefiles").mkdir(parents=True)
    (folder / "src").mkdir()
    (folder / "src" / "init.cc").write_text("// host code\n")
    lines = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    (folder / "makefiles" / "version.mk").write_text(
        "".join(f"NCCL_{name}   := {value}\n" for name, value in lines)
    )
    return folder


@pytest.fixture
def without_source(monkeypatch, tmp_path):
    """Let holmes find no NCCL source code, from which it builds NCCL for emulated GPUs.

    The environment variable that names the source's folder is unset, and the user's cache folder is empty.
    """
    monkeypatch.delenv(nccl_source.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


def test_no_nccl_source(without_source, tmp_path):
    """Without NCCL's source code, the error gives the git command that clones it into the user's cache."""
    command = (
        f"git clone -b v2.29.7-1 {nccl_source.REPOSITORY} {tmp_path}/user/holmes_ext/nccl, or name"
    )
    with pytest.raises(HolmesError, match=command):
        nccl_source.find_nccl(None, tmp_path)


def test_the_first_nccl_source_that_is_given_is_used(without_source, monkeypatch, tmp_path):
    """NCCL's source is taken from the option, else the environment variable, else the user's cache.

    Each of these folders has another version of NCCL.
    """
    # nccl_checkout() writes a folder that looks like NCCL's source.
    nccl_checkout(tmp_path / "user" / "holmes_ext" / "nccl", version="2.27.7")  # the user's cache
    from_variable = nccl_checkout(tmp_path / "variable", version="2.28.9")
    from_option = nccl_checkout(tmp_path / "option", version="2.29.7")
    assert nccl_source.find_nccl(None, tmp_path).name == "2.27.7"
    monkeypatch.setenv(nccl_source.VARIABLE, str(from_variable))
    assert nccl_source.find_nccl(None, tmp_path).name == "2.28.9"
    assert nccl_source.find_nccl(str(from_option), tmp_path).name == "2.29.7"


def test_a_variable_that_names_no_folder_is_an_error(without_source, monkeypatch, tmp_path):
    """If the environment variable for NCCL's source names a missing folder, holmes ends with an error.

    It does not use the source in the user's cache instead.
    """
    nccl_checkout(tmp_path / "user" / "holmes_ext" / "nccl")
    monkeypatch.setenv(nccl_source.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(HolmesError, match="nowhere: there is no such NCCL source"):
        nccl_source.find_nccl(None, tmp_path)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda folder: folder / "nowhere", "there is no such NCCL source"),
        (lambda folder: folder, "is no checkout of NCCL"),
        (
            lambda folder: nccl_checkout(folder / "old", "2.18.3"),
            "is NCCL 2.18.3; the emulated GPU takes 2.27.7 and newer: git -C .*old checkout v2.29.7-1",
        ),
        (
            lambda folder: nccl_checkout(folder / "old", "2.26.6"),
            "is NCCL 2.26.6; the emulated GPU takes 2.27.7 and newer",
        ),
        (
            lambda folder: shutil.copy(__file__, folder / "x.tar.gz"),
            "is neither a folder nor an archive of NCCL's source",
        ),
    ],
)
def test_a_source_that_will_not_do(without_source, tmp_path, make, said):
    with pytest.raises(HolmesError, match=said):
        nccl_source.find_nccl(str(make(tmp_path)), tmp_path / "cache")


@pytest.mark.parametrize("version", ["2.27.3", "2.30.9"])
def test_an_nccl_of_a_tried_minor_version_gives_no_warning(
    without_source, tmp_path, capsys, version
):
    source = nccl_source.find_nccl(str(nccl_checkout(tmp_path / "nccl", version)), tmp_path)
    assert source.name == version
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("version", ["2.31.2", "2.32.3", "3.0.1"])
def test_an_nccl_that_is_newer_than_all_tried_ones_is_used_with_a_warning(
    without_source, tmp_path, capsys, version
):
    folder = nccl_checkout(tmp_path / "nccl", version)
    source = nccl_source.find_nccl(str(folder), tmp_path)
    assert source.name == version
    assert capsys.readouterr().err == (
        f"holmes: warning: {folder} is NCCL {version}; the emulated GPU was never tried with a version newer "
        "than 2.30.7. Its results are checked when it is built\n"
    )


def test_the_source_of_the_nccl_that_torch_ships_with_is_preferred(without_source, tmp_path):
    """The user's cache may hold one folder for each version, and one for any version.

    The folder for any version is used if there is none for the wanted version.
    """
    cache = tmp_path / "user" / "holmes_ext"
    nccl_checkout(cache / "nccl", version="2.29.7")
    nccl_checkout(cache / "nccl-2.30.7", version="2.30.7")
    assert nccl_source.find_nccl(None, tmp_path, wanted="2.30.7").name == "2.30.7"
    assert nccl_source.find_nccl(None, tmp_path, wanted="2.28.9").name == "2.29.7"
    assert nccl_source.find_nccl(None, tmp_path).name == "2.29.7"


def test_an_archive_is_unpacked_once(without_source, tmp_path):
    """If NCCL's source is a .tar.gz file, the first call unpacks it and later calls use the same folder."""
    archive = tmp_path / "nccl.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        folder = nccl_checkout(tmp_path / "nccl-2.29.7-1")  # looks like NCCL's source
        file.add(folder, "nccl-2.29.7-1")
    first = nccl_source.find_nccl(str(archive), tmp_path / "cache")
    assert first.name == "2.29.7"
    assert first.code == "22907"  # NCCL_VERSION_CODE: 2 * 10000 + 29 * 100 + 7
    added_file = first.folder / "src" / "kept.cc"
    added_file.write_text("")  # would be gone if the archive were unpacked again
    second = nccl_source.find_nccl(str(archive), tmp_path / "cache")
    assert second.folder == first.folder
    assert added_file.exists()


def python_with(folder, version, cuda):
    """Return an environment in which torch has this version and this CUDA."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("")
    (folder / "torch" / "version.py").write_text(TORCH.format(version, cuda))
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    "version, cuda, said",
    [
        ("2.13.0+cpu", None, r"\(2.13.0\+cpu\) is built for the CPU only; install its CUDA build"),
        (
            "2.5.1",
            "12.4",
            "torch 2.5.1 with CUDA 12.4 was not tried, only 2.13 with CUDA 13 and 2.15 with CUDA 13. "
            "HOLMES_GPU_UNTRIED=1",
        ),
    ],
)
def test_a_torch_that_will_not_do(tmp_path, monkeypatch, version, cuda, said):
    monkeypatch.delenv(torch_build.UNTRIED, raising=False)
    with pytest.raises(HolmesError, match=said):
        torch_build.find_torch(sys.executable, python_with(tmp_path, version, cuda))


def test_a_torch_that_calls_what_this_nccl_lacks(tmp_path):
    source = nccl_source.NcclSource(nccl_checkout(tmp_path / "nccl"), (2, 27, 7), "")
    (source.folder / "src" / "nccl.h.in").write_text(
        "ncclResult_t ncclBroadcast(ncclComm_t comm);\n"
    )
    torch = torch_build.TorchBuild("python", tmp_path / "torch", "2.13.0", (13, 0), "")
    (torch.folder / "lib").mkdir(parents=True)
    calls = 'extern "C" void {0}(); void call_{0}() {{ {0}(); }}'
    for called in ("ncclBroadcast", "ncclCommResume"):
        subprocess.run(
            [
                *compiler.find_compiler().command,
                "-shared",
                "-fPIC",
                "-xc++",
                "-",
                "-o",
                torch.folder / "lib" / f"libtorch_{called}.so",
            ],
            input=calls.format(called),
            text=True,
            check=True,
        )
    with pytest.raises(
        HolmesError,
        match=r"NCCL 2.27.7 lacks ncclCommResume, which torch 2.13.0 calls; take "
        r"newer source: git clone -b v2.29.7-1",
    ):
        libraries.check_functions(torch, source)


def test_a_command_that_is_none(tmp_path):
    with pytest.raises(HolmesError, match="no-such-program: no such command"):
        torch_build.python_of(["no-such-program"], os.environ)


def test_gpus_that_a_rank_would_not_find(monkeypatch):
    with pytest.raises(HolmesError, match="--gpu 1: the 2 processes of a node need a GPU each"):
        Gpus(None, 1).check(2, 4, {})
    with pytest.raises(
        HolmesError,
        match="CUDA_VISIBLE_DEVICES=1 hides emulated GPUs: it shows 1 to the 2 processes",
    ):
        Gpus(None, 2).check(2, 4, {"CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setattr(job, "memory_left_mb", lambda: 1500)
    with pytest.raises(
        HolmesError,
        match="4 ranks need at least 2000 MB of memory, and this machine has 1500 MB left",
    ):
        Gpus(None).check(2, 4, {})
    assert Gpus(None, 4).check(2, 2, {"CUDA_VISIBLE_DEVICES": "3,1"}) == 4


@pytest.mark.parametrize(
    "text, count", [(None, 4), ("", 0), ("0,1", 2), ("1,9,2", 1), ("x", 0), ("-1", 0)]
)
def test_visible_devices(text, count):
    assert visible(text, 4) == count


def test_a_clock_by_clusters():
    clock = parse_clock(json.dumps({"flops": 2e9, "speed": {"a": 0.5}}))
    assert clock == GpuClock(2e9, speed={"a": 0.5})
    assert clock.variables("a") == {"HOLMES_GPU_SMS": "108", "HOLMES_GPU_MFLOPS": "1000"}
    with pytest.raises(HolmesError, match="key 'speed.a': 0.0 is not a factor above 0"):
        parse_clock('{"speed": {"a": 0.0}}')


@pytest.mark.parametrize(
    "printed, missing",
    [
        (
            "holmes: emulated GPU: kernel my_adder(float*) of aten::add is not "
            "emulated\nTraceback\nIt failed",
            "kernel my_adder(float*) of aten::add is not emulated",
        ),
        (
            "NotImplementedError: emulated GPU: aten::_weight_int4pack_mm is not emulated",
            "aten::_weight_int4pack_mm is not emulated",
        ),
        (
            "holmes: emulated GPU: this machine has no 512 MB left for device memory; run fewer ranks",
            "this machine has no 512 MB left for device memory; run fewer ranks",
        ),
        ("holmes: emulated GPU: torch.compile traces but generates no code\nValueError: 7", ""),
    ],
)
def test_a_job_that_asks_for_what_is_not_emulated(printed, missing):
    lines = {0: [("stderr", "fine")], 1: [("stderr", line) for line in printed.splitlines()]}
    assert (
        find_missing_emulation(RunResult(1, {0: -15, 1: 1}, lines, 1.0, first_failed=1)) == missing
    )
    assert find_missing_emulation(RunResult(0, {0: 0, 1: 0}, lines, 1.0)) == ""


def test_a_rank_that_the_kernel_ends_for_want_of_memory():
    ended = RunResult(137, {0: -15, 1: -9}, {0: [], 1: []}, 1.0, first_failed=1)
    assert find_missing_emulation(ended, killed=True).startswith(
        "this machine had no memory left; run fewer ranks"
    )
    assert find_missing_emulation(ended) == "" and killed_for_memory() >= 0
