"""Tests that the plan of a running job follows changes: a slower rate, a lost link, a slow rank.

The plan must change within ten steps, and the losses must be those without holmes. An emulated accelerator
determines the time of layers.
"""

import json
import re
import threading
import time

import pytest
from clusters import toml

from holmes_ext.report.files import load
from integration_tests.jobs import PRELOAD, TRAIN, lab_fixture, losses, said, same

#: A block takes 0.03 s forward and backward, a stage 0.06 s; at SLOW_BPS an activation takes as long.
SIZE = "--layers 4 --hidden 64 --heads 4 --sequence 64 --micro-batch 1 --micro-batches 8 --stages 2".split()
ACCELERATOR = {"flops": 7.3e8, "classes": ["Block"]}
SLOW_BPS = round(8 * 64 * 64 * 4 / 0.06)
STEPS = 38
WITHIN = 10  # steps in which the plan must follow a change
two_nodes = lab_fixture(toml("a ib 1Gb/s a0", "b roce 1Gb/s b0", ethernet="1Gb/s"))


class Changes(threading.Thread):
    """Thread that makes changes, each once as soon as the log has a number of lines."""

    def __init__(self, log, changes):
        super().__init__()
        self.log = log
        self.changes = changes  # (number of lines, function that makes the change)
        self.over = threading.Event()  # set when the job has ended

    def run(self):
        for step, change in self.changes:
            while self.steps() < step:
                if self.over.wait(0.02):
                    return
            change()

    def steps(self):
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.mark.full(share=4)
def test_the_plan_follows_what_changes(two_nodes, tmp_path):
    lab = two_nodes.lab
    throttle = tmp_path / "throttle.json"
    log = tmp_path / "drifts"
    telemetry = tmp_path / "telemetry"

    def set_rate(bps):
        for node in lab.nodes:
            lab.set_rate(node.name, "eth0", bps)

    def cut_link():
        lab.set_link("b0", "eth0", up=False)
        time.sleep(2)
        lab.set_link("b0", "eth0", up=True)

    def slow_down_rank():
        throttle.with_suffix(".new").write_text(json.dumps({"b0": 1 / 3}))
        throttle.with_suffix(".new").rename(throttle)
        set_rate(10**9)

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
    slow_link_step = 8
    steps = [
        (slow_link_step, lambda: set_rate(SLOW_BPS)),
        (20, cut_link),
        (26, slow_down_rank),
    ]
    changes = Changes(log, steps)
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
        set_rate(10**9)
    assert result.returncode == 0, result.outputs
    assert same(losses(tmp_path / "stock"), losses(log))
    plans = [(plan["step"], plan["in_flight"]) for plan in load(telemetry).ranks[0].plans]
    # A message takes as long as the passes of a stage, so the first stage needs four micro-batches in flight.
    last_step = slow_link_step + WITHIN + 1
    assert any(
        slow_link_step <= step <= last_step and in_flight[0] >= 4 for step, in_flight in plans
    ), plans
    text = "\n".join(said(result))
    assert re.search("NIC eth0 .*node b0.* is back after", text), text
    assert re.search(r"a restart with --holmes-partition 3,1 would take 0\.\d+ of a step", text), (
        text
    )
