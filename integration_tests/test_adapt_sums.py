"""Gradients of a data-parallel job in the lab are summed another way once the network is found faster
than the cluster file told: on all ranks from one step on, with stock's losses, and told in one line.
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
#: An emulated GPU's backward pass takes long enough to hide the sums.
AFTER = ("--no-overlap",) * ON_GPUS
PLANNED = ("--holmes-overlap", "off") * ON_GPUS
CHANGED = (
    r"holmes: gradients in one ring, in buckets of \S+ \S+ \(were hierarchically, in chunks of"
)


@pytest.fixture(scope="module")
def told_slow(tmp_path_factory):
    """Fast networks of 100 Mb/s; of Ethernet the file says 20 Mb/s, and it carries 2.5 Gb/s."""
    file = tmp_path_factory.mktemp("clusters") / "slow.toml"
    text = re.sub(r'rate = "[^"]*"', 'rate = "100Mb/s"', CLUSTER.read_text())
    file.write_text(text.replace('rate = "100Mb/s"', 'rate = "20Mb/s"', 1))
    with Lab(load_spec(file)) as lab:
        for node in lab.nodes:
            lab.set_rate(node.name, "eth0", 2_500_000_000)
        yield LabOf(file, lab)


@gloo_only
def test_distributed_data_parallel_goes_another_way_too(told_slow, tmp_path):
    found = {}
    ways = {
        "stock": ((), {"GLOO_SOCKET_IFNAME": "eth0"}),
        "learned": ((*told_slow.holmes, "--holmes-telemetry", str(tmp_path / "telemetry")), None),
    }
    for name, (flags, env) in ways.items():
        log = tmp_path / f"{name}.jsonl"
        result = told_slow.run(str(SCRIPTS / "ddp.py"), "16", str(log), *flags, env=env)
        assert result.returncode == 0, result.outputs
        found[name] = losses(log)
    assert re.search(CHANGED, "".join(result.outputs.values())), result.outputs
    assert same(found["stock"], found["learned"], 1e-5)
    plan, *_ = load(tmp_path / "telemetry").ranks[0].plans
    assert "in one ring" in plan["sums"] and 3 <= plan["step"] < 14


@over_nccl
def test_the_sums_of_a_job_go_another_way(told_slow, tmp_path):
    found, holmes = {}, (*told_slow.holmes, *PLANNED)
    ways = {
        "stock": ((), {"GLOO_SOCKET_IFNAME": "eth0"}),
        "learned": ((*holmes, "--holmes-telemetry", str(tmp_path / "telemetry")), None),
        "off": ((*holmes, "--holmes-adapt", "off"), None),
    }
    for name, (flags, env) in ways.items():
        log = tmp_path / f"{name}.jsonl"
        result = told_slow.run(SCRIPT, *JOB, *AFTER, "--log-file", str(log), *flags, env=env)
        assert result.returncode == 0, result.outputs
        text = "".join(result.outputs.values())
        assert bool(re.search(CHANGED, text)) == (name == "learned"), text
        found[name] = losses(log)
    assert same(found["stock"], found["learned"], 1e-5) and same(
        found["off"], found["learned"], 1e-5
    )
    plan, *_ = load(tmp_path / "telemetry").ranks[0].plans
    assert "in one ring" in plan["sums"] and 3 <= plan["step"] < 14
