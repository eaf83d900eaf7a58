"""Tests --holmes-check with real ranks on two emulated clusters: its report, its status, and its end."""

import json
import sys

import pytest

from integration_tests.jobs import CLUSTER, said

#: Arguments of a model of Megatron-LM that is small, in two pipeline stages.
MODEL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 "
    "--global-batch-size 16 --max-position-embeddings 1024 --pipeline-model-parallel-size 2 --bf16"
).split()
#: What the script prints if a checked job runs it.
FIRST_STEP = "FIRST STEP"


@pytest.fixture
def script(tmp_path):
    """Return a training script of which nothing may run."""
    path = tmp_path / "pretrain_gpt.py"
    path.write_text(f"print({FIRST_STEP!r}, flush=True)\n")
    return str(path)


def outputs(result) -> str:
    return "\n".join(result.outputs.values())


def test_report_of_a_job_with_a_model(two_clusters, script):
    """One rank prints the whole report, and no rank begins to train."""
    result = two_clusters.run(script, *MODEL, "--holmes-check", "--holmes-cluster", str(CLUSTER))
    assert result.returncode == 0, result.outputs
    assert FIRST_STEP not in outputs(result)
    (report,) = [text for text in result.stdout.values() if text]
    lines = [line.split() for line in report.splitlines()]
    assert ["0-1", "a[0-1]", "a", "0", "0-3"] in lines
    assert ["2-3", "b[0-1]", "b", "1", "4-7"] in lines
    assert ["data", "1", "a", "a"] in lines
    assert ["data", "1", "b", "b"] in lines
    assert ["pipeline", "2", "ethernet", "ethernet"] in lines
    assert "s with holmes" in report
    assert "worst measured error of the model" in report
    assert "check: 0 problems" in report
    # The command has --holmes-cluster already.
    changes = [line for line in report.splitlines() if line.startswith("  ")]
    assert changes and not any("--holmes-cluster" in line for line in changes)


ACCELERATE = (
    f"{sys.executable} -m accelerate.commands.launch --cpu --num_processes 4 --num_machines 4 "
    "--machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT"
)


@pytest.mark.parametrize(
    "how", ["variables", "python -m holmes_ext", "mpirun's variables", "accelerate launch"]
)
def test_every_launcher_ends_before_the_script(two_clusters, script, how):
    """The ranks of each way to start a job end with status 0, also without an agent's store."""
    env = {}
    run = f"{sys.executable} {script} --holmes-check=json"
    if how == "variables":
        run = f"{sys.executable} {script}"
        env = {"HOLMES": "1", "HOLMES_CHECK": "json"}
    elif how == "python -m holmes_ext":
        # The script's name follows the flag, which takes no value from it.
        run = f"{sys.executable} -m holmes_ext --holmes-check {script}"
    elif how == "accelerate launch":
        pytest.importorskip("accelerate")
        run = f"{ACCELERATE} {script} --holmes-check=json"
    else:
        values = ("RANK=$RANK", "SIZE=$WORLD_SIZE", "LOCAL_RANK=0", "LOCAL_SIZE=1")
        names = " ".join(f"OMPI_COMM_WORLD_{value}" for value in values)
        run = f"env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE {names} {run}"
    result = two_clusters.run("sh", "-c", f"exec {run}", env=env)
    assert result.returncode == 0, result.outputs
    assert FIRST_STEP not in outputs(result)
    (report,) = [text for text in result.stdout.values() if text.strip()]
    if how == "python -m holmes_ext":
        assert "check: 0 problems" in report
    else:
        assert json.loads(report)["status"] == 0


def test_torchrun_with_two_ranks_on_a_node(two_clusters, script, tmp_path):
    """The JSON has all facts, and the agents of torchrun end without an error."""
    file = tmp_path / "check.json"
    torchrun = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes 4 --nproc-per-node 1 "
        "--node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT "
        f"{script} {' '.join(MODEL)} --holmes-check={file} --holmes-cluster {CLUSTER}"
    )
    result = two_clusters.run("sh", "-c", torchrun)
    assert result.returncode == 0, result.outputs
    document = json.loads(file.read_text())
    assert document["status"] == 0
    assert [placed["cluster"] for placed in document["placement"]] == ["a", "b"]
    assert document["prediction"]["stock_s"] > document["prediction"]["step_s"] > 0
    assert FIRST_STEP not in outputs(result)


def test_nic_without_link_is_a_problem(two_clusters, script):
    """The groups of its node use Ethernet, one line names the NIC, and all ranks end with status 1."""
    lab = two_clusters.lab
    lab.set_link("b1", "roce0", up=False)
    try:
        flags = (*MODEL, "--holmes-check", "--holmes-cluster", str(CLUSTER))
        result = two_clusters.run(script, *flags)
    finally:
        lab.set_link("b1", "roce0", up=True)
    assert set(result.statuses.values()) == {1}, result.outputs
    report = "".join(result.stdout.values())
    (problem,) = [line for line in report.splitlines() if line.startswith("problem: ")]
    assert "node b1" in problem and "DOWN" in problem
    assert ["data", "1", "ethernet", "ethernet"] in [line.split() for line in report.splitlines()]
    assert "check: 1 problem;" in report
    assert FIRST_STEP not in outputs(result)
    assert "Traceback" not in outputs(result)


def test_wrong_nic_in_the_cluster_file_ends_the_job_in_one_line(two_clusters, script, tmp_path):
    """The job would not start at all, so the status is that of bad input."""
    file = tmp_path / "cluster.toml"
    text = CLUSTER.read_text()
    file.write_text(text.replace('kind = "ib"\n', 'kind = "ib"\ninclude = ["mlx5_9"]\n'))
    result = two_clusters.run(script, "--holmes-check", "--holmes-cluster", str(file))
    assert set(result.statuses.values()) == {2}
    (line,) = said(result)
    assert "'mlx5_9' matches no NIC" in line


def test_flag_on_some_ranks_only(two_clusters, script):
    """A rank without the flag ends the job with a line, and no rank waits for ever."""
    command = (
        f"if [ $RANK = 2 ]; then exec {sys.executable} {script} --holmes; "
        f"else exec {sys.executable} {script} --holmes-check; fi"
    )
    result = two_clusters.run("sh", "-c", command, timeout=60)
    assert result.returncode == 2
    assert any("--holmes-check" in line for line in said(result)), result.outputs
    assert FIRST_STEP not in outputs(result)
