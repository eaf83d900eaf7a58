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
#: These take longest, so they begin: by their waits, then by several jobs one after the other.
FIRST = ("time_limit", "srun_node_goes_down", "mpirun_sigterm", "holmes_lab_run", "scontrol_requeue",
         "holmes_doctor_over_an_allocation", "example_sizes", "example_trainer", "example_deepspeed",
         "example_megatron_lm", "example_mpi")
#: Exhaustive: of examples/schedulers/, one job after the other, all but one;
#: other ways to lay out the same ranks.
LONGER = {*(name for name in CASES if name.startswith("example_") and name != "example_mpi"),
          "srun_one_rank_a_node", "srun_cyclic", "srun_plane", "srun_heterogeneous", "mpirun_by_node",
          "deepspeed_include"}
CHOSEN = [name for name in CASES if name not in LONGER]
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
    """The cases that pytest was asked for, all started."""
    names = [item.callspec.params["name"] for item in request.session.items
             if item.module is request.module
             and "name" in getattr(getattr(item, "callspec", None), "params", ())]
    chosen = [name for name in dict.fromkeys((*FIRST, *names)) if name in names]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {name: pool.submit(CASES[name], tmp_path_factory.mktemp(name)) for name in chosen}


#: Rows of README's table: what a case begins with.
LAUNCHERS = ("torchrun", "srun", "mpirun", "deepspeed")


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    launcher = name.partition("_")[0]
    marks = [pytest.mark.row(launcher)] if launcher in LAUNCHERS else []
    return marks if name in CHOSEN else [*marks, full]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_launch(running, name, tmp_path):
    """What the pool made of it; again (--reruns) from the start."""
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
    """50 labs, every other one with Slurm and with sshd and mpirun; as a sample one of each."""
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
