"""Tests that a data-parallel job changes the way in which it reduces gradients.

The network is faster than the cluster file says. When holmes has found that, all ranks must change at the
same step and print one line, and the losses must be those without holmes.
"""

import re

import pytest
from carriers import gloo_only
from holmes_lab import Lab

from holmes_ext.cluster.spec import load_spec
from holmes_ext.report.files import load
from integration_tests.jobs import CLUSTER, ON_GPUS, ROOT, SCRIPTS, LabOf, losses, over_nccl, same

SCRIPT = str(ROOT / "examples" / "plain_torch" / "train.py")
JOB = "--layers 2 --hidden 128 --sequence 16 --micro-batch 1 --steps 16".split()
#: Flags for emulated GPUs, whose backward pass takes so long that it would hide the reductions.
AFTER = ("--no-overlap",) * ON_GPUS
PLANNED = ("--holmes-overlap", "off") * ON_GPUS
CHANGED = (
    r"holmes: gradients in one ring, in buckets of \S+ \S+ \(were hierarchically, in chunks of"
)


@pytest.fixture(scope="module")
def declared_slow(tmp_path_factory):
    """Start nodes whose Ethernet carries 2.5 Gb/s, while cluster.toml declares 20 Mb/s.

    The fast networks have 100 Mb/s.
    """
    file = tmp_path_factory.mktemp("clusters") / "slow.toml"
    text = re.sub(r'rate = "[^"]*"', 'rate = "100Mb/s"', CLUSTER.read_text())
    file.write_text(text.replace('rate = "100Mb/s"', 'rate = "20Mb/s"', 1))
    with Lab(load_spec(file)) as lab:
        for node in lab.nodes:
            lab.set_rate(node.name, "eth0", 2_500_000_000)
        yield LabOf(file, lab)


@gloo_only
def test_distributed_data_parallel_goes_another_way_too(declared_slow, tmp_path):
    losses_of = {}
    ways = {
        "stock": ((), {"GLOO_SOCKET_IFNAME": "eth0"}),
        "learned": (
            (*declared_slow.holmes, "--holmes-telemetry", str(tmp_path / "telemetry")),
            None,
        ),
    }
    for name, (flags, env) in ways.items():
        log = tmp_path / f"{name}.jsonl"
        result = declared_slow.run(str(SCRIPTS / "ddp.py"), "16", str(log), *flags, env=env)
        assert result.returncode == 0, result.outputs
        losses_of[name] = losses(log)
    assert re.search(CHANGED, "".join(result.outputs.values())), result.outputs
    assert same(losses_of["stock"], losses_of["learned"], 1e-5)
    plan, *_ = load(tmp_path / "telemetry").ranks[0].plans
    assert "in one ring" in plan["sums"] and 3 <= plan["step"] < 14


@over_nccl
def test_the_sums_of_a_job_go_another_way(declared_slow, tmp_path):
    losses_of = {}
    holmes = (*declared_slow.holmes, *PLANNED)
    ways = {
        "stock": ((), {"GLOO_SOCKET_IFNAME": "eth0"}),
        "learned": ((*holmes, "--holmes-telemetry", str(tmp_path / "telemetry")), None),
        "off": ((*holmes, "--holmes-adapt", "off"), None),
    }
    for name, (flags, env) in ways.items():
        log = tmp_path / f"{name}.jsonl"
        result = declared_slow.run(SCRIPT, *JOB, *AFTER, "--log-file", str(log), *flags, env=env)
        assert result.returncode == 0, result.outputs
        text = "".join(result.outputs.values())
        assert bool(re.search(CHANGED, text)) == (name == "learned"), text
        losses_of[name] = losses(log)
    assert same(losses_of["stock"], losses_of["learned"], 1e-5) and same(
        losses_of["off"], losses_of["learned"], 1e-5
    )
    plan, *_ = load(tmp_path / "telemetry").ranks[0].plans
    assert "in one ring" in plan["sums"] and 3 <= plan["step"] < 14
