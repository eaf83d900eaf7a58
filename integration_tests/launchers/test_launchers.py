"""Every launcher that README names really launches: Slurm, Open MPI, deepspeed and torchrun on emulated
clusters.

The cases run side by side, each in a lab of its own: much of what they do is waiting. What is left of them
afterwards is asked here, too.
"""

import contextlib
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holmes_ext.lab import state
from integration_tests.jobs import full
from integration_tests.launchers import commands, examples  # noqa: F401  more cases
from integration_tests.launchers.bench import Bench
from integration_tests.launchers.cases import CASES, hostfile

SIDE_BY_SIDE = 6
#: The longest cases, which are started first: they wait, or run several jobs one after the other.
FIRST = ("time_limit", "srun_node_goes_down", "mpirun_sigterm", "holmes_lab_run", "scontrol_requeue",
         "holmes_doctor_over_an_allocation", "example_sizes", "example_trainer", "example_deepspeed",
         "example_megatron_lm", "example_mpi")
#: Exhaustive cases: all but one of those that run examples/, and further layouts of the same ranks.
EXHAUSTIVE = {*(name for name in CASES if name.startswith("example_") and name != "example_mpi"),
          "srun_one_rank_a_node", "srun_cyclic", "srun_plane", "srun_heterogeneous", "mpirun_by_node",
          "deepspeed_include"}
PROGRAMS = ("srun", "slurmctld", "slurmd", "munged", "mpirun", "sshd", "pdsh")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]
pytestmark = pytest.mark.skipif(bool(MISSING) or os.getuid() != 0,
                                reason=f"needs root and {' '.join(MISSING)}: .ci/run says how they are "
                                       f"installed")


@pytest.fixture(scope="module", autouse=True)
def of_others():
    """Folders of labs that other tests of this process keep."""
    return own_labs()


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    """Start all selected cases, SIDE_BY_SIDE at a time; yield their futures by name."""
    selected = []
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.module is request.module and "name" in parameters:
            selected.append(parameters["name"])
    longest_first = dict.fromkeys((*FIRST, *selected))
    ordered = [name for name in longest_first if name in selected]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {name: pool.submit(CASES[name], tmp_path_factory.mktemp(name)) for name in ordered}


#: Launchers that are rows of README's table. The name of a case begins with its launcher.
LAUNCHERS = ("torchrun", "srun", "mpirun", "deepspeed")


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a case: the row of README's table that it tests, and whether it is exhaustive."""
    marks = []
    launcher = name.partition("_")[0]
    if launcher in LAUNCHERS:
        marks.append(pytest.mark.row(launcher))
    if name in EXHAUSTIVE:
        marks.append(full)
    return marks


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_launch(running, name, tmp_path):
    """A case succeeds: the one that the fixture started, or in a rerun (--reruns) a fresh one."""
    future = running.pop(name, None)
    if future:
        future.result()
    else:
        CASES[name](tmp_path)


def test_nothing_is_left(running, of_others):
    for future in running.values():  # where pytest was asked for this test alone, or ended early
        future.exception()
    assert left(of_others) == []


def test_starts_and_stops_leave_nothing(tmp_path, of_others, exhaustive):
    """50 labs (2 as a sample), in turns with sshd and mpirun and with Slurm, leave no process and no file."""
    for number in range(50 if exhaustive else 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Bench(folder, ("slurm",) if number % 2 else ("ssh",)) as bench:
            if number % 2:
                said = bench.run("srun", "--nodes=4", "hostname")
            else:
                said = bench.run("mpirun", "--allow-run-as-root", "--hostfile", hostfile(bench), "sh", "-c",
                                 "hostname; ls -d /run/ompi.$(hostname).*")
                assert all(f"/run/ompi.{host}." in said for host in bench.order), said
            hosts = ["a0", "a1", "b0", "b1"]  # between warnings of a busy machine
            assert sorted(line for line in said.splitlines() if line in hosts) == hosts, said
            assert left(of_others)  # a lab that runs is seen
        assert left(of_others) == []


OWN = f"holmes-lab-{os.getuid()}-{os.getpid()}-"


def own_labs() -> set[str]:
    return {path.name for path in state.directories() if path.name.startswith(OWN)}


def left(of_others: set[str]) -> list[str]:
    """What there is of this process's labs, without those of other tests: folders, processes, mounts,
    sockets, Open MPI's session folders."""
    def is_left(line: str) -> bool:
        return OWN in line and not any(name in line for name in of_others)

    found = sorted(own_labs() - of_others)
    for table in ("/proc/mounts", "/proc/net/unix"):
        found += [f"{table}: {line}" for line in Path(table).read_text().splitlines() if is_left(line)]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            told = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            if is_left(told.decode(errors="replace")):
                found.append(f"process {folder.name}: {told[:200]!r}")
    return found + [str(path) for path in Path(tempfile.gettempdir()).glob("ompi.*")]
