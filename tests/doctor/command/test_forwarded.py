"""doctor/command/forwarded.py: environment variables that a launcher does not pass to other nodes."""

import shlex
from pathlib import Path

import pytest

from holmes_ext.doctor.command.forwarded import check_forwarded
from holmes_ext.doctor.command.launch import read_launches

ON_TWO = "mpirun -np 2 -H a:1,b:1"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a slots=8\nb slots=8\n")
    Path("one").write_text("a slots=8\n")


def found(command, environ, has_flag=False):
    words = shlex.split(command)
    launches = read_launches(words, environ)
    return [f"{f.level} {f.about}" for f in check_forwarded(launches, words, environ, has_flag)]


@pytest.mark.parametrize(
    "command, environ, expected",
    [
        ("deepspeed --hostfile hosts", {"HOLMES": "1"}, ["problem HOLMES"]),
        ("deepspeed --hostfile one", {"HOLMES": "1"}, []),
        ("deepspeed --hostfile hosts", {"NCCL_DEBUG": "INFO", "HOLMES_NODE": "a"}, []),
        (f"{ON_TWO} -x MASTER_ADDR=a -x PATH", {"HOLMES": "1"}, ["problem HOLMES"]),
        (f"{ON_TWO} -x MASTER_ADDR=a -x HOLMES", {"HOLMES": "1"}, []),
        (
            f"{ON_TWO} -x MASTER_ADDR=a",
            {"HOLMES": "1", "HOLMES_CLUSTER": "c.toml"},
            ["problem HOLMES, HOLMES_CLUSTER"],
        ),
        (ON_TWO, {"HOLMES": "1", "MASTER_ADDR": "a"}, []),  # perhaps MPICH, which passes all
        (ON_TWO, {}, ["note MASTER_ADDR"]),
        (f"{ON_TWO} -x PATH", {"MASTER_ADDR": "a"}, ["note MASTER_ADDR"]),
        (ON_TWO, {"SLURM_JOB_ID": "7"}, []),
        (f"{ON_TWO} torchrun --nnodes 2", {}, []),
        ("mpirun -np 8 -H a:8", {}, []),
        ("srun -N 2 -w a,b", {"HOLMES": "1"}, []),
        ("torchrun --nnodes 2", {"HOLMES": "1"}, []),
        ("", {"HOLMES": "1"}, []),
    ],
)
def test_variables_for_other_nodes(command, environ, expected):
    assert found(command, environ) == expected


def test_the_flag_is_enough():
    assert found("deepspeed --hostfile hosts", {"HOLMES": "1"}, has_flag=True) == []


def test_deepspeeds_file_of_variables():
    Path(".deepspeed_env").write_text("HOLMES=1\n")
    assert found("deepspeed --hostfile hosts", {"HOLMES": "1"}) == []
    assert found("deepspeed --hostfile hosts", {"HOLMES_CLUSTER": "c"}) == [
        "problem HOLMES_CLUSTER"
    ]
