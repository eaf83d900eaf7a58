"""Unmodified scripts of Hugging Face's Trainer and of Lightning, on two emulated clusters.

They are started with the launchers that users of these libraries type: torchrun and accelerate.
"""

import sys

import pytest

from integration_tests.jobs import ROOT, full, losses, said, same

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TRAINER = str(ROOT / "examples" / "trainer" / "train.py")
LIGHTNING = str(ROOT / "examples" / "lightning" / "train.py")
MODEL = "--layers 2 --hidden 128 --sequence 16 --micro-batch 2 --micro-batches 2".split()
#: Of 2 layers of 128: what a step reduces.
GRADIENT_MB = (2 * (12 * 128 * 128 + 13 * 128) + (256 + 16 + 2) * 128) * 4 / 1e6
PRELOAD = ("torch", "transformers.trainer")
NODES = ("--nproc-per-node 1 --nnodes 4 --node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port "
         "$MASTER_PORT")
ACCELERATE = (
    "--cpu --num_processes 4 --num_machines 4 --machine_rank $NODE_RANK --main_process_ip $MASTER_ADDR"
              " --main_process_port $MASTER_PORT")


def train(clusters, directory, script, *flags, name="log", **more):
    """(losses, what holmes said, MB that the nodes sent on Ethernet)"""
    log, before = directory / f"{name}.jsonl", clusters.lab.counters()
    result = clusters.run(script, *MODEL, "--log-file", str(log), *flags, preload=PRELOAD, **more)
    assert result.returncode == 0, result.outputs
    crossed = sum(nics["eth0"] for nics in clusters.sent(before).values())
    return losses(log), said(result), crossed


@pytest.mark.parametrize("script", [
    pytest.param(TRAINER, id="Trainer", marks=pytest.mark.row("Trainer")),
    pytest.param(LIGHTNING, id="Lightning", marks=[pytest.mark.row("Lightning"), full]),
])
def test_losses_are_stock_s_and_only_sums_cross(two_clusters, tmp_path, script):
    if script == LIGHTNING:
        pytest.importorskip("lightning")
    crossed = {}
    for way, flags in (("stock", ()), ("holmes", two_clusters.holmes)):
        env = {} if flags else {"GLOO_SOCKET_IFNAME": "eth0"}
        short, *_, few = train(two_clusters, tmp_path, script, "--steps", "4", *flags, name=f"{way}-4",
                               env=env)
        long, told, many = train(two_clusters, tmp_path, script, "--steps", "12", *flags, name=f"{way}-12",
                                 env=env)
        crossed[way] = long, (many - few) / 8
    assert len(long) == 12 and same(crossed["stock"][0], long)
    assert crossed["holmes"][1] < 2 * GRADIENT_MB * 1.1 + 0.1, ("one gradient from each cluster, and small "
                                                                "things")
    assert crossed["stock"][1] > 5 * GRADIENT_MB, "a flat ring sends 2 (n-1)/n from every node"


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


@full  # rows/test_rows.py starts Accelerate's launcher in each landing
@pytest.mark.row("Accelerate")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_checkpoints_and_resume(two_clusters, tmp_path, launcher):
    """A job resumed from the checkpoint of step 2 has the losses of steps 3 and 4 again (all with holmes)."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    found = []
    for name, more in (("whole", ["--save-steps", "2"]), ("resumed", ["--resume"])):
        log = tmp_path / f"{name}.jsonl"
        output = tmp_path / "out"
        words = [TRAINER, *MODEL, "--steps", "4", "--output", str(output), "--log-file", str(log), *more,
                 *two_clusters.holmes]
        if name == "resumed":
            (last,) = output.glob("checkpoint-4")
            last.rename(tmp_path / "checkpoint-4")  # so that the newest one is of step 2
        result = two_clusters.run("sh", "-c", f"exec {LAUNCHERS[launcher]} {' '.join(words)}",
                                  env={"CONFIG": str(tmp_path / "config.yaml")}, timeout=240)
        assert result.returncode == 0, result.outputs
        assert any("ranks renumbered" in line for line in said(result)), said(result)
        found.append(losses(log))
    assert len(found[0]) == 4 and same(found[0][2:], found[1])
