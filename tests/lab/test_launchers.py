"""Tests the command lines and configuration files for `holmes lab run --launcher NAME`.

The lab emulates a cluster on this machine and can start a job there with torchrun, srun, mpirun or deepspeed.
These tests start no launcher; those in integration_tests/launchers/ do.
"""

import os
import shlex
import subprocess
from types import SimpleNamespace

import clusters
import pytest
from holmes_lab import Lab
from holmes_lab.launchers import slurm, ssh
from holmes_lab.launchers.command import command_line, start_with_launcher, starts_itself
from holmes_lab.launchers.daemons import Daemons
from holmes_lab.network.shaping import lay_out, login_node
from holmes_lab.rights import program

from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError

SPEC = parse_spec(clusters.toml("a ib 2Gb/s a0,a1", "b roce 1Gb/s b0", ethernet="400Mb/s"))
JOB = ["python", "train.py", "--holmes"]


def line(launcher, command, tmp_path, counts=(2, 2), position=0):
    return command_line(launcher, ["b0", "a0"], counts, command, tmp_path, position)


def test_a_job_of_each_launcher(tmp_path):
    assert line("torchrun", JOB, tmp_path) == [
        "python",
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-id=lab",
        "--rdzv-endpoint=b0:29400",
        "--no-python",
        *JOB,
    ]
    assert line("torchrun", ["./run.sh"], tmp_path)[0] == "torchrun"
    found = line("srun", JOB, tmp_path)
    assert (
        found[0] == "srun"
        and "--nodelist=b0,a0" in found
        and "--ntasks-per-node=2" in found
        and found[-3:] == JOB
    )
    found = line("mpirun", JOB, tmp_path)
    assert (
        found[0] == "mpirun" and "MASTER_ADDR=b0" in found and found[found.index("-np") + 1] == "4"
    )
    assert (tmp_path / "hostfile").read_text() == "b0 slots=2\na0 slots=2\n"
    found = line("deepspeed", JOB, tmp_path)
    assert found[:3] == ["python", "-m", "deepspeed.launcher.runner"] and found[-2:] == JOB[1:]


def test_a_job_on_nodes_with_different_numbers_of_processes(tmp_path):
    """Nodes may run different numbers of processes.

    torchrun's number differs between nodes; srun starts a heterogeneous job.
    """
    assert "--nproc-per-node=4" in line("torchrun", JOB, tmp_path, (4, 2), position=0)
    assert "--nproc-per-node=2" in line("torchrun", JOB, tmp_path, (4, 2), position=1)
    found = line("srun", JOB, tmp_path, (4, 2))
    first, second = " ".join(found[1:-3]).split(" : ")
    assert "--nodes=1 --nodelist=b0 --ntasks-per-node=4 --gpus-per-node=4" in first
    assert "--nodes=1 --nodelist=a0 --ntasks-per-node=2 --gpus-per-node=2" in second
    found = line("mpirun", JOB, tmp_path, (4, 2))
    assert found[found.index("-np") + 1] == "6"
    assert (tmp_path / "hostfile").read_text() == "b0 slots=4\na0 slots=2\n"


@pytest.mark.parametrize(
    "launcher, command",
    [
        ("srun", ["sbatch", "--wait", "job.sh"]),
        ("srun", ["/opt/slurm/bin/srun", "hostname"]),
        ("mpirun", ["mpirun", "x"]),
        ("deepspeed", ["deepspeed", "x.py"]),
        ("torchrun", ["torchrun", "x.py"]),
        ("torchrun", ["python3", "-m", "torch.distributed.run", "x.py"]),
    ],
)
def test_a_command_of_the_launcher_itself_stands(tmp_path, launcher, command):
    assert starts_itself(launcher, command) and line(launcher, command, tmp_path) == command


@pytest.mark.parametrize("command", [["./train.sh"], ["python", "-m", "train"], ["python"]])
def test_deepspeed_starts_scripts(tmp_path, command):
    with pytest.raises(HolmesError, match="`python SCRIPT ...`"):
        line("deepspeed", command, tmp_path)


def test_slurm_knows_the_clusters(tmp_path):
    processes = {"b0": 8, "a1": 4, "a0": 4}
    slurm.configure(
        tmp_path, SPEC, ["b0", "a1", "a0"], processes, {"a0": {"HOLMES_LAB_NODE": "a0"}}
    )
    conf = (tmp_path / "slurm.conf").read_text().splitlines()
    nodes = [text.split()[0] for text in conf if text.startswith("NodeName=")]
    assert nodes == ["NodeName=b0", "NodeName=a1", "NodeName=a0"]
    assert any("Gres=gpu:8 Feature=roce,b " in text for text in conf)
    assert (
        "PartitionName=a Nodes=a0,a1 State=UP" in conf
        and os.stat(tmp_path / "munge.key").st_mode & 0o077 == 0
    )
    assert any("NodeName=a0 " in text and "Gres=gpu:4 " in text for text in conf)
    gpus = [text.split()[0] for text in (tmp_path / "gres.conf").read_text().splitlines()]
    assert (gpus.count("NodeName=b0"), gpus.count("NodeName=a0")) == (8, 4)
    assert "SwitchName=spine Switches=leaf_a,leaf_b" in (tmp_path / "topology.conf").read_text()
    assert "a0) echo export HOLMES_LAB_NODE=a0;;" in (tmp_path / "task_prolog").read_text()


def test_sessions_get_variables_as_they_are(tmp_path):
    ssh.configure(tmp_path, {"a0": {"X": 'a "b" \\c'}})
    assert 'SetEnv "X=a \\"b\\" \\\\c"' in (tmp_path / "sshd_config.a0").read_text()


def test_sessions_do_not_read_bashrc(tmp_path):
    ssh.configure(tmp_path, {"a0": {}})
    config = (tmp_path / "sshd_config.a0").read_text().splitlines()
    given = next(shlex.split(line)[1:] for line in config if line.startswith("SetEnv"))
    (tmp_path / ".bashrc").write_text("echo read\n")
    env = {"HOME": str(tmp_path), "SSH_CLIENT": "10.0.0.1 40000 22"}
    env.update(text.split("=", 1) for text in given)
    done = subprocess.run(["bash", "-c", "echo ran"], env=env, capture_output=True, text=True)
    assert done.stdout == "ran\n"


def test_the_login_host():
    nodes = lay_out(SPEC, 1.0)
    login = login_node(SPEC, nodes, 1.0)
    assert login.address == "10.77.0.4" and login.nics[0].port == "e3" and len(login.nics) == 1
    named = parse_spec(clusters.toml("a ib 2Gb/s login", ethernet="400Mb/s"))
    with pytest.raises(HolmesError, match="node 'login' has the name of the host"):
        login_node(named, lay_out(named, 1.0), 1.0)


def test_a_missing_program_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr("holmes_lab.rights.shutil.which", lambda *_, **__: None)
    with pytest.raises(
        HolmesError, match="need `slurmctld`, which is missing; apt-get install slurm-wlm"
    ):
        program("slurmctld")


@pytest.mark.parametrize("launcher, package", [("mpirun", "openmpi-bin"), ("srun", "slurm-wlm")])
def test_a_missing_launcher_is_named_with_its_package(launcher, package, monkeypatch):
    """If srun or mpirun is not on PATH, the error names the package to install, before any daemon starts.

    If the job's command names the launcher by its path, such as /opt/bin/srun, PATH does not matter.
    """

    def fail_at_daemons(*_, **__):
        raise HolmesError("the daemons start")

    def start_job(command):
        """Start a job of one process in an emulated cluster. This never ends without an error."""
        lab = SimpleNamespace(nodes=lay_out(SPEC, 1.0), spec=SPEC)
        start_with_launcher(
            lab, launcher, command, order=None, processes=1, env={}, accelerator=None
        )

    # No program is on PATH.
    monkeypatch.setattr("holmes_lab.rights.shutil.which", lambda *_, **__: None)
    # The class Daemons starts the launcher's daemons: slurmctld, sshd, ...
    monkeypatch.setattr("holmes_lab.launchers.command.Daemons", fail_at_daemons)
    message = f"need `{launcher}`, which is missing; apt-get install {package}"
    with pytest.raises(HolmesError, match=message):
        start_job(["python", "train.py"])
    with pytest.raises(HolmesError, match="the daemons start"):
        start_job([f"/opt/bin/{launcher}", "true"])


def test_daemons_need_root(monkeypatch):
    monkeypatch.setattr("holmes_lab.launchers.daemons.os.getuid", lambda: 1000)
    with pytest.raises(HolmesError, match="need root"):
        Daemons(Lab(SPEC, login=True), ("slurm",))
