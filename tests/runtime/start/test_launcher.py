import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.start.launcher import Process, detect, exported

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_torchrun():
    assert detect(TORCHRUN) == Process(3, 8, 1, 2, "a0", 29400, "torchrun", agent_store=True)


def test_deepspeed_launcher():
    environ = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "CROSS_RANK": "1",
        "MASTER_ADDR": "a0",
    }
    assert detect(environ) == Process(3, 4, 1, 2, "a0", 29500, "deepspeed")


def test_torchrun_inside_srun_is_torchrun():
    assert detect({**TORCHRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}).launcher == "torchrun"


@pytest.mark.parametrize(
    "nodelist, first",
    [("gpu[003-008,012],x1", "gpu003"), ("a0,b0", "a0"), ("n[7]-ib", "n7-ib"), ("solo", "solo")],
)
def test_srun(nodelist, first):
    environ = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "20003",
        "SLURM_STEP_ID": "0",
    }
    process = detect({**environ, "SLURM_STEP_NODELIST": nodelist})
    assert process == Process(5, 8, 1, 2, first, 10003, "srun")


SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "a[0-1],b[0-1]",
}


@pytest.mark.parametrize("kind", ["HET", "PACK"])
@pytest.mark.parametrize(
    "nodelist, first", [("a[0-1],b[0-1]", "b0"), ("a[0-1]", "a0"), ("a1,b1", "b1")]
)
def test_rank_0_of_a_heterogeneous_step(kind, nodelist, first):
    """Slurm sorts the step's list; its tasks begin in the first component that is in the step."""
    groups = {
        f"SLURM_JOB_NODELIST_{kind}_GROUP_0": "b[0-1]",
        f"SLURM_JOB_NODELIST_{kind}_GROUP_1": "a[0-1]",
    }
    environ = {**SRUN, **groups, "SLURM_HET_SIZE": "2", "SLURM_STEP_NODELIST": nodelist}
    assert detect(environ).master_addr == first


def test_tasks_of_a_node_in_a_heterogeneous_job():
    """Every task has SLURM_NTASKS_PER_NODE of the first component, so the number is not known (0)."""
    assert detect({**SRUN, "SLURM_NTASKS_PER_NODE": "2"}).local_world_size == 2
    assert detect({**SRUN, "SLURM_NTASKS_PER_NODE": "4(x2)"}).local_world_size == 4
    for components, count in (("1", 2), ("2", 0)):
        environ = {**SRUN, "SLURM_NTASKS_PER_NODE": "2", "SLURM_HET_SIZE": components}
        assert detect(environ).local_world_size == count


def test_rank_0_of_an_arbitrary_distribution(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("\nb1\na0\n")
    environ = {**SRUN, "SLURM_DISTRIBUTION": "arbitrary"}
    assert detect({**environ, "SLURM_HOSTFILE": str(hosts)}).master_addr == "b1"
    assert detect({**environ, "MASTER_ADDR": "b1"}).master_addr == "b1"
    for more in ({}, {"SLURM_HOSTFILE": f"{hosts}.x"}):
        with pytest.raises(HolmesError, match="export MASTER_ADDR"):
            detect({**environ, **more})


def test_mpirun_inside_an_allocation():
    """The daemon orted is a task of srun; its ranks are mpirun's."""
    ompi = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in dict(RANK="7", SIZE="8", LOCAL_RANK="1", LOCAL_SIZE="2").items()
    }
    daemon = {
        **SRUN,
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "3",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_NODELIST": "a[0-3]",
        "SLURM_STEP_NODELIST": "a[1-3]",
    }
    process = detect({**daemon, **ompi})
    assert (process.rank, process.master_addr) == (7, "a0")
    hydra = {"PMI_RANK": "7", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
    assert detect({**daemon, **hydra}).launcher == "mpirun (Hydra)"
    assert detect({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"}).launcher == "srun"


def test_a_slurm_batch_script_is_not_a_rank():
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}).world_size == 1


def test_mpirun():
    environ = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in dict(RANK="2", SIZE="4", LOCAL_RANK="0", LOCAL_SIZE="2").items()
    }
    with pytest.raises(HolmesError, match="MASTER_ADDR is not set"):
        detect(environ)
    assert detect({**environ, "MASTER_ADDR": "a0"}) == Process(
        2, 4, 0, 2, "a0", 29500, "mpirun (Open MPI)"
    )
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MASTER_ADDR": "a0"}
    assert detect(hydra).local_world_size == 0


def test_no_launcher_is_one_process():
    assert detect({}).world_size == 1


@pytest.mark.parametrize(
    "change, message",
    [
        ({"RANK": "x"}, "RANK is 'x', not a number"),
        ({"RANK": "8"}, "rank 8 is not below the world size 8"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_bad_environment_is_named(change, message):
    with pytest.raises(HolmesError, match=message):
        detect({**TORCHRUN, **change})


def test_exported_takes_the_new_rank_and_keeps_the_local_one():
    values = exported(detect(TORCHRUN), 6, 2)
    assert (values["RANK"], values["LOCAL_RANK"], values["LOCAL_WORLD_SIZE"]) == ("6", "1", "2")
