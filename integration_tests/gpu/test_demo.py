"""Tests what `holmes demo --gpu` prints about the networks and losses of a short job."""

import json
import subprocess
import sys

import pytest

from integration_tests.gpu.conftest import TOML


@pytest.mark.each_landing
def test_stock_and_holmes_have_the_same_losses_on_other_networks(gpus):
    done = subprocess.run(
        [sys.executable, "-m", "holmes_ext.cli.main", "demo", "--gpu", "--json", "--steps", "6"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    stock, holmes = result["losses"]["stock"], result["losses"]["holmes"]
    assert len(stock) == len(holmes) == 6 and stock[-1] < stock[0]
    assert result["emulated"] == "GPU"
    largest_difference = max(abs(a - b) for a, b in zip(stock, holmes))
    assert result["max_loss_difference"] == largest_difference <= 1e-6
    networks = [{group["network"] for group in run["groups"]} for run in result["runs"]]
    assert [run["name"] for run in result["runs"]] == ["stock", "holmes"]
    assert networks[0] == {"Socket"} and "IB" in networks[1], networks
    ethernet = []  # bytes sent over Ethernet, in the run without and the run with holmes
    fast = []  # the same over the fast NICs
    for run in result["runs"]:
        ethernet.append(sum(nic["sent"] for nic in run["nics"] if nic["nic"] == "eth0"))
        fast.append(sum(nic["sent"] for nic in run["nics"] if nic["nic"] != "eth0"))
    assert ethernet[1] < 0.7 * ethernet[0] and fast[1] > 10 * fast[0], (ethernet, fast)
    assert (
        "the network that NCCL chose for each group" in done.stderr
        and "Emulated GPU: numbers" in done.stderr
    )


def test_what_is_not_emulated_is_one_line_and_status_2(gpus, tmp_path):
    script = tmp_path / "train.py"
    file = tmp_path / "cluster.toml"
    script.write_text(
        "import torch\na = torch.ones(2, 2, device='cuda')\n"
        "torch.ops.aten._weight_int4pack_mm(a, a, 32, torch.ones(2, 2, 2, device='cuda'))\n"
    )
    file.write_text(TOML)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "holmes_ext.cli.main",
            "lab",
            "run",
            "--cluster",
            str(file),
            "--order",
            "a0",
            "--processes",
            "1",
            "--gpu",
            "--",
            sys.executable,
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert (
        "holmes lab: rank 0 ended because of the emulation: aten::_weight_int4pack_mm is not emulated\n"
        in done.stderr
    )
