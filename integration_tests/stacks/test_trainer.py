"""Tests training scripts that use Hugging Face's Trainer or Lightning, on two emulated clusters.

The scripts do not import holmes; flags switch it on. The launchers are those that users of these libraries
have: torchrun and accelerate. The tests compare losses and traffic between the clusters with those without
holmes.
"""

import sys

import pytest

from integration_tests.jobs import ROOT, full, losses, said, same

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TRAINER = str(ROOT / "examples" / "trainer" / "train.py")
LIGHTNING = str(ROOT / "examples" / "lightning" / "train.py")
MODEL = "--layers 2 --hidden 128 --sequence 16 --micro-batch 2 --micro-batches 2".split()
#: MB of gradients that a step reduces, for 2 layers of hidden size 128.
GRADIENT_MB = (2 * (12 * 128 * 128 + 13 * 128) + (256 + 16 + 2) * 128) * 4 / 1e6
PRELOAD = ("torch", "transformers.trainer")
NODES = (
    "--nproc-per-node 1 --nnodes 4 --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port "
    "$MASTER_PORT"
)
ACCELERATE = (
    "--cpu --num_processes 4 --num_machines 4 --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR"
    " --main_process_port $MASTER_PORT"
)


def train(clusters, directory, script, *flags, name="log", **more):
    """Train with `script` on all nodes.

    Returns:
        The losses, the messages of holmes, and the MB that all nodes sent over Ethernet.
    """
    log, before = directory / f"{name}.jsonl", clusters.lab.counters()
    result = clusters.run(script, *MODEL, "--log-file", str(log), *flags, preload=PRELOAD, **more)
    assert result.returncode == 0, result.outputs
    crossed = sum(nics["eth0"] for nics in clusters.sent(before).values())
    return losses(log), said(result), crossed


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(TRAINER, id="Trainer", marks=pytest.mark.row("Trainer")),
        pytest.param(LIGHTNING, id="Lightning", marks=[pytest.mark.row("Lightning"), full]),
    ],
)
def test_losses_are_stock_s_and_only_sums_cross(two_clusters, tmp_path, script):
    """Holmes does not change the losses, and only sums of gradients cross between the two clusters.

    The traffic of a step is the difference between a job of 12 steps and one of 4, divided by 8 steps. So the
    traffic of the start does not count.
    """
    if script == LIGHTNING:
        pytest.importorskip("lightning")
    # Both by "stock" (without holmes) and "holmes". step_mb: MB that all nodes send over Ethernet in a step.
    losses_of, step_mb = {}, {}
    for name, flags in (("stock", ()), ("holmes", two_clusters.holmes)):
        # Without holmes, gloo uses the only network that all nodes share.
        env = {} if flags else {"GLOO_SOCKET_IFNAME": "eth0"}
        _, _, mb_of_4_steps = train(
            two_clusters, tmp_path, script, "--steps", "4", *flags, name=f"{name}-4", env=env
        )
        losses_of[name], _, mb_of_12_steps = train(
            two_clusters, tmp_path, script, "--steps", "12", *flags, name=f"{name}-12", env=env
        )
        step_mb[name] = (mb_of_12_steps - mb_of_4_steps) / 8
    assert len(losses_of["holmes"]) == 12
    assert same(losses_of["stock"], losses_of["holmes"])
    # Each of the two clusters sends one gradient, and a few small messages: up to 10 % and 0.1 MB.
    assert step_mb["holmes"] < 2 * GRADIENT_MB * 1.1 + 0.1
    # In a ring of all four nodes, each node sends 2 * 3/4 gradients: 6 gradients together. 5 leaves room.
    assert step_mb["stock"] > 5 * GRADIENT_MB


LAUNCHERS = {
    "torchrun": f"{sys.executable} -m torch.distributed.run {NODES}",
    "accelerate": f"{sys.executable} -m accelerate.commands.launch {ACCELERATE}",
    "accelerate's config file": f"{sys.executable} -m accelerate.commands.launch --config_file $CONFIG"
    " --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR"
    " --main_process_port $MASTER_PORT",
}
CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
use_cpu: true
num_machines: 4
num_processes: 4
"""


@full  # rows/test_rows.py tests Accelerate's launcher before each merge
@pytest.mark.row("Accelerate")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_checkpoints_and_resume(two_clusters, tmp_path, launcher):
    """A job with holmes that resumes from its checkpoint of step 2 repeats the losses of steps 3 and 4."""
    config = tmp_path / "config.yaml"  # for accelerate launch --config_file
    config.write_text(CONFIG)
    output = tmp_path / "out"  # the checkpoints

    def train_with_launcher(name, *flags):
        log = tmp_path / f"{name}.jsonl"
        script = [
            TRAINER,
            *MODEL,
            "--steps",
            "4",
            "--output",
            str(output),
            "--log-file",
            str(log),
            *flags,
            *two_clusters.holmes,
        ]
        command = f"exec {LAUNCHERS[launcher]} {' '.join(script)}"
        result = two_clusters.run("sh", "-c", command, env={"CONFIG": str(config)}, timeout=240)
        assert result.returncode == 0, result.outputs
        messages = said(result)  # of holmes
        assert any("ranks renumbered" in line for line in messages), messages  # holmes is on
        return losses(log)

    whole = train_with_launcher("whole", "--save-steps", "2")  # checkpoints after steps 2 and 4
    (last_checkpoint,) = output.glob("checkpoint-4")
    last_checkpoint.rename(tmp_path / "checkpoint-4")  # now the newest checkpoint is that of step 2
    resumed = train_with_launcher("resumed", "--resume")
    assert len(whole) == 4
    assert same(whole[2:], resumed)  # the losses of steps 3 and 4
