"""A network between clusters becomes too slow for gradients in each step, and fast again: the clusters of a
data-parallel job go on by themselves (--holmes-apart) and come back, with the same weights on all ranks."""

import json
import re

import pytest

from holmes_ext.report.files import load
from integration_tests.jobs import CLUSTER, ON_GPUS, SCRIPTS, lab_fixture, losses, said, same
from integration_tests.test_adapt_drift import Changes

STEPS, FALLS, RISES = 70, 8, 40
FAST, SLOW = 10**9, 3 * 10**6
FLAGS = ("--holmes-apart", "3", "--holmes-outer", "every=8,fragments=2,delay=2")
#: All networks of 1 Gb/s.
two_clusters = lab_fixture(re.sub(r'rate = "[^"]*"', 'rate = "1Gb/s"', CLUSTER.read_text()))


@pytest.mark.parametrize("how", ["reducer"] if ON_GPUS else ["reducer", "ddp"])
def test_clusters_go_apart_while_the_network_is_slow(two_clusters, tmp_path, how):
    lab, log, telemetry = two_clusters.lab, tmp_path / "apart", tmp_path / "telemetry"

    def rate(bps):
        for node in lab.nodes:
            lab.set_rate(node.name, "eth0", bps)

    command = str(SCRIPTS / "apart.py"), how, str(STEPS)
    stock = two_clusters.run(*command, str(tmp_path / "stock"), env={"GLOO_SOCKET_IFNAME": "eth0"})
    assert stock.returncode == 0, stock.outputs
    changes = Changes(log, [(FALLS, lambda: rate(SLOW)), (RISES, lambda: rate(FAST))])
    changes.start()
    try:
        result = two_clusters.run(*command, str(log), *two_clusters.holmes, *FLAGS, "--holmes-telemetry",
                                  str(telemetry))
    finally:
        changes.over.set()
        changes.join()
        rate(FAST)
    assert result.returncode == 0, result.outputs
    alike = [json.loads(line)["alike"] for line in log.read_text().splitlines()]
    assert False in alike, said(result)
    left = alike.index(False)
    back = alike.index(True, left)
    assert FALLS <= left < RISES <= back and all(alike[back:]), (alike, said(result))
    assert same(losses(tmp_path / "stock")[:left], losses(log)[:left], 1e-5)
    text = "\n".join(said(result))
    assert "inside each cluster only, weights averaged across in rounds of 8 steps (were in" in text, text
    assert "the clusters are one job again" in text, text
    plans = [plan["sums"] for plan in load(telemetry).ranks[0].plans]
    assert any("inside each cluster only" in one for one in plans), plans
