"""Every launcher that README names really launches: Slurm, Open MPI, deepspeed and torchrun on emulated clusters.

The cases (cases.py) run side by side, each in a lab of its own: most of what they do is waiting. What is left of them
afterwards is asked here, too. HOLMES_TEST_FULL=1 runs all of them.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holmes_ext.lab import state
from integration_tests.jobs import FULL, some
from integration_tests.launchers import examples  # noqa: F401  more cases
from integration_tests.launchers.cases import CASES

SIDE_BY_SIDE = 4
#: What runs without HOLMES_TEST_FULL=1: every launcher, and what differs most from torchrun.
CHOSEN = ("torchrun_in_srun", "srun_heterogeneous", "scontrol_requeue", "mpirun_rankfile", "deepspeed_include",
          "holmes_discover_from_slurm")
PROGRAMS = ("srun", "slurmctld", "slurmd", "munged", "mpirun", "sshd", "pdsh")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]
pytestmark = pytest.mark.skipif(bool(MISSING) or os.getuid() != 0,
                                reason=f"needs root and {' '.join(MISSING)}: .ci/run says how they are installed")


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    """The chosen cases, all started."""
    names = [item.callspec.params["name"] for item in request.session.items
             if item.module is request.module and "name" in getattr(getattr(item, "callspec", None), "params", ())]
    chosen = [name for name in names if FULL or name in CHOSEN]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {name: pool.submit(CASES[name], tmp_path_factory.mktemp(name)) for name in chosen}


@pytest.mark.parametrize("name", some(CASES, *CHOSEN))
def test_launch(running, name):
    running[name].result()


def test_nothing_is_left(running):
    for future in running.values():
        future.exception()
    own = f"holmes-lab-{os.getuid()}-{os.getpid()}-"
    assert not [path for path in state.directories() if path.name.startswith(own)]
    assert not [pid for pid in _daemons() if own in _command(pid)]
    assert own not in Path("/proc/mounts").read_text()


def _daemons():
    return [path.name for path in Path("/proc").glob("[0-9]*")]


def _command(pid):
    try:
        return Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
