"""What changes while a job runs: a rate falls, a link is gone for seconds, a rank gets slow. The plan follows
within ten steps, and the losses are stock's. Layers take the time of an emulated accelerator.
"""

import json
import re
import threading
import time

from clusters import toml

from holmes_ext.report.files import load
from integration_tests.jobs import PRELOAD, TRAIN, lab_fixture, losses, said, same

#: A block takes 0.03 s forward and backward, a stage 0.06 s; at SLOW_BPS an activation takes as long.
SIZE = "--layers 4 --hidden 64 --heads 4 --sequence 64 --micro-batch 1 --micro-batches 8 --stages 2".split()
ACCELERATOR = {"flops": 7.3e8, "classes": ["Block"]}
SLOW_BPS = round(8 * 64 * 64 * 4 / 0.06)
STEPS, WITHIN = 38, 10
two_nodes = lab_fixture(toml("a ib 1Gb/s a0", "b roce 1Gb/s b0", ethernet="1Gb/s"))


class Changes(threading.Thread):
    """Each one is made, once, when the log has so many lines."""

    def __init__(self, log, changes):
        super().__init__()
        self.log, self.changes, self.over = log, changes, threading.Event()

    def run(self):
        for step, change in self.changes:
            while self.steps() < step:
                if self.over.wait(0.02):
                    return
            change()

    def steps(self):
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def test_the_plan_follows_what_changes(two_nodes, tmp_path):
    lab, throttle = two_nodes.lab, tmp_path / "throttle.json"
    log, telemetry = tmp_path / "drifts", tmp_path / "telemetry"

    def rate(bps):
        for node in lab.nodes:
            lab.set_rate(node.name, "eth0", bps)

    def link_gone():
        lab.set_link("b0", "eth0", up=False)
        time.sleep(2)
        lab.set_link("b0", "eth0", up=True)

    def slow_rank():
        throttle.with_suffix(".new").write_text(json.dumps({"b0": 1 / 3}))
        throttle.with_suffix(".new").rename(throttle)
        rate(10**9)

    flags = ("--log", str(log), *two_nodes.holmes, "--holmes-telemetry", str(telemetry))
    command = (TRAIN, *SIZE, "--steps", str(STEPS))
    stock = two_nodes.run(
        *command,
        "--log",
        str(tmp_path / "stock"),
        preload=PRELOAD,
        env={"GLOO_SOCKET_IFNAME": "eth0"},
    )
    assert stock.returncode == 0, stock.outputs
    falls, slows = 8, 26
    changes = Changes(log, [(falls, lambda: rate(SLOW_BPS)), (20, link_gone), (slows, slow_rank)])
    changes.start()
    try:
        result = two_nodes.run(
            *command,
            *flags,
            preload=PRELOAD,
            accelerator={**ACCELERATOR, "throttle": str(throttle)},
        )
    finally:
        changes.over.set()
        changes.join()
        lab.set_link("b0", "eth0", up=True)
        rate(10**9)
    assert result.returncode == 0, result.outputs
    assert same(losses(tmp_path / "stock"), losses(log))
    plans = [(plan["step"], plan["in_flight"]) for plan in load(telemetry).ranks[0].plans]
    # with a message as long as a stage's passes the first stage needs four micro-batches in flight
    assert any(falls <= step <= falls + WITHIN + 1 and held[0] >= 4 for step, held in plans), plans
    text = "\n".join(said(result))
    assert re.search("NIC eth0 .*node b0.* is back after", text), text
    assert re.search(r"a restart with --holmes-partition 3,1 would take 0\.\d+ of a step", text), (
        text
    )
