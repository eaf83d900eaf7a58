"""Tests each launcher that README names with real jobs: Slurm, Open MPI, deepspeed and torchrun.

Each case starts its launcher on a lab, a cluster emulated with network namespaces on this machine. The cases
mostly wait, so several run at the same time. Further tests check that no process and no file of a lab is left
afterwards.
"""

import contextlib
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from holmes_lab import state

from integration_tests.jobs import full
from integration_tests.launchers import checks, commands, examples  # noqa: F401  more cases
from integration_tests.launchers.bench import Bench
from integration_tests.launchers.cases import CASES, hostfile

SIDE_BY_SIDE = 6
#: The longest cases, which are started first: they wait, or run several jobs one after the other.
FIRST = (
    "time_limit",
    "srun_node_goes_down",
    "mpirun_sigterm",
    "holmes_lab_run",
    "scontrol_requeue",
    "holmes_doctor_over_an_allocation",
    "example_sizes",
    "example_trainer",
    "example_deepspeed",
    "example_megatron_lm",
    "example_mpi",
)
#: Exhaustive cases: all but one of those that run examples/, and further layouts of the same ranks.
EXHAUSTIVE = {
    *(name for name in CASES if name.startswith("example_") and name != "example_mpi"),
    "srun_one_rank_a_node",
    "srun_cyclic",
    "srun_plane",
    "srun_heterogeneous",
    "mpirun_by_node",
    "mpirun_nodes_of_different_width",
    "deepspeed_include",
    "deepspeed_nodes_of_different_width",
    "torchrun_two_ranks_a_node",
    "srun_arbitrary",
    "mpirun_rankfile",
    "srun_on_some_nodes_of_the_file",
    "time_limit",
}
#: Cases of which one in four runs before every merge: further ways of launchers that other cases start.
SAMPLED = {
    "torchrun_in_srun",
    "scontrol_requeue",
    "mpirun_in_sbatch",
    "mpirun_sigterm",
    "holmes_lab_shell",
    "holmes_doctor_over_an_allocation",
    "holmes_probe_in_srun",
    "torchrun_check",
    "srun_check",
    "mpirun_check",
    "deepspeed_check",
}
PROGRAMS = ("srun", "slurmctld", "slurmd", "munged", "mpirun", "sshd", "pdsh")
MISSING = [
    name
    for name in PROGRAMS
    if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
]
pytestmark = pytest.mark.skipif(
    bool(MISSING) or os.getuid() != 0,
    reason=f"needs root and {' '.join(MISSING)}: .ci/run says how they are installed",
)


@pytest.fixture(scope="module", autouse=True)
def labs_of_other_tests():
    """Names of the labs that run before this file's tests; other tests of this process still use them."""
    return own_labs()


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    """Start all selected cases of this file in a thread pool and yield their futures: name -> future."""
    selected = []  # names of the cases that pytest will run in this session
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if item.module is request.module and "name" in parameters:
            selected.append(parameters["name"])
    longest_first = dict.fromkeys((*FIRST, *selected))  # FIRST: the cases that take longest
    ordered = [name for name in longest_first if name in selected]
    with ThreadPoolExecutor(max_workers=SIDE_BY_SIDE) as pool:
        yield {name: pool.submit(CASES[name], tmp_path_factory.mktemp(name)) for name in ordered}


#: Launchers that are rows of README's table. The name of a case begins with its launcher.
LAUNCHERS = ("torchrun", "srun", "mpirun", "deepspeed")


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Return the pytest marks of the case `name`.

    The mark `row` names the launcher that the case tests, as README's table lists it. The mark `full` is for
    cases that are too slow to run before every merge.
    """
    marks = []
    launcher = name.partition("_")[0]  # "srun_cyclic" tests srun
    if launcher in LAUNCHERS:
        marks.append(pytest.mark.row(launcher))
    if name in EXHAUSTIVE:
        marks.append(full)
    elif name in SAMPLED:
        marks.append(full(share=4))
    return marks


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_launch(running, name, tmp_path):
    """The case `name` succeeds.

    The fixture `running` has started the case in a thread. If pytest repeats the test (--reruns), the case
    runs again here.
    """
    future = running.pop(name, None)
    if future:
        future.result()  # raises the error of a failed case
    else:
        CASES[name](tmp_path)


def test_nothing_is_left(running, labs_of_other_tests):
    for future in running.values():  # where pytest was asked for this test alone, or ended early
        future.exception()
    assert leftovers(labs_of_other_tests) == []


def test_starts_and_stops_leave_nothing(tmp_path, labs_of_other_tests, exhaustive):
    """Labs (emulated clusters) that start, run a job and stop leave no process and no file behind.

    Each lab has either the daemons of Slurm or sshd for mpirun. There are 50 labs, or 2 in the short version
    of the test.
    """
    hosts = ["a0", "a1", "b0", "b1"]
    lab_count = 50 if exhaustive else 2
    for number in range(lab_count):
        folder = tmp_path / str(number)
        folder.mkdir()
        uses_slurm = number % 2 == 1
        daemons = ("slurm",) if uses_slurm else ("ssh",)
        with Bench(folder, needs=daemons) as bench:  # starts the lab, and stops it at the end
            if uses_slurm:
                output = bench.run("srun", "--nodes=4", "hostname")
            else:
                output = bench.run(
                    "mpirun",
                    "--allow-run-as-root",
                    "--hostfile",
                    hostfile(bench),
                    "sh",
                    "-c",
                    "hostname; ls -d /run/ompi.$(hostname).*",
                )
                assert all(f"/run/ompi.{host}." in output for host in bench.order), output
            # The launcher's warnings may stand between the host names.
            assert sorted(line for line in output.splitlines() if line in hosts) == hosts, output
            assert leftovers(labs_of_other_tests)  # leftovers() finds the lab while it runs
        assert leftovers(labs_of_other_tests) == []


#: Prefix of the names of all labs (emulated clusters) of this process.
OWN = f"holmes-lab-{os.getuid()}-{os.getpid()}-"


def own_labs() -> set[str]:
    return {path.name for path in state.directories() if path.name.startswith(OWN)}


def leftovers(labs_of_other_tests: set[str]) -> list[str]:
    """Return what still exists of the labs (emulated clusters) that this file's tests started.

    Each folder, mount, socket and process of such a lab is one line, and each session folder of Open MPI.
    """

    def is_left(line: str) -> bool:  # OWN: prefix of the names of this process's labs
        return OWN in line and not any(name in line for name in labs_of_other_tests)

    found = sorted(own_labs() - labs_of_other_tests)  # folders of labs
    for table in ("/proc/mounts", "/proc/net/unix"):
        found += [
            f"{table}: {line}" for line in Path(table).read_text().splitlines() if is_left(line)
        ]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            command = (folder / "cmdline").read_bytes()
            variables = (folder / "environ").read_bytes()
            command_and_variables = command + variables
            if is_left(command_and_variables.decode(errors="replace")):
                found.append(f"process {folder.name}: {command_and_variables[:200]!r}")
    open_mpi_folders = Path(tempfile.gettempdir()).glob("ompi.*")
    return found + [str(path) for path in open_mpi_folders]
