"""Tests examples/doubling in jobs on two emulated clusters: the losses equal those of stock."""

import os
import shutil
import subprocess
import sys

import pytest

from integration_tests.jobs import ROOT, SCRIPTS, losses, same

DDP = str(SCRIPTS / "ddp.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the environment of a job in which the extension is installed."""
    folder = tmp_path_factory.mktemp("doubling")
    source = shutil.copytree(ROOT / "examples" / "doubling", folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", folder / "packages", source], check=True)
    path = os.pathsep.join(filter(None, (str(folder / "packages"), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path}


def test_losses_of_ddp_are_those_of_stock(two_clusters, installed, tmp_path):
    flags = (*two_clusters.holmes, "--holmes-adapt", "off")
    runs = {
        "stock": ((), {"GLOO_SOCKET_IFNAME": "eth0"}),
        "holmes": (flags, None),
        "doubling": ((*flags, "--holmes-doubling"), installed),
    }
    found = {}
    for name, (more, env) in runs.items():
        log = tmp_path / f"{name}.jsonl"
        result = two_clusters.run(DDP, "6", str(log), *more, env=env)
        assert result.returncode == 0, result.outputs
        found[name] = losses(log)
    assert len(found["stock"]) == 6
    assert same(found["stock"], found["doubling"]) and same(found["stock"], found["holmes"])
