import json
import os
import sys
from pathlib import Path

import pytest

from holmes_ext.cluster.spec import load_spec
from holmes_ext.lab import Lab, interleave

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "integration_tests" / "scripts"
CLUSTER = ROOT / "examples" / "clusters" / "two_clusters_4.toml"
FULL = os.environ.get("HOLMES_TEST_FULL") == "1"
#: Of a test or a case that costs more than it adds to each CI run.
full = pytest.mark.skipif(not FULL, reason="HOLMES_TEST_FULL=1")


def some(cases, *chosen):
    """All cases; without HOLMES_TEST_FULL=1 only the chosen ones run."""
    assert set(chosen) <= set(cases), set(chosen) - set(cases)
    return [case if case in chosen else pytest.param(case, marks=full) for case in cases]


class LabOf:
    """A lab of one cluster file, nodes launched in turn (a0, b0, a1, b1): what a scheduler that knows nothing does."""

    def __init__(self, file: Path, lab: Lab):
        self.file, self.lab, self.spec = file, lab, lab.spec
        self.order = interleave(lab.spec)

    def run(self, *command: str, timeout: float = 240, preload=("torch",), env=None, **more):
        """Run a command (a script's path and arguments, unless it starts with "sh") on every node."""
        argv = list(command) if command[0] == "sh" else [sys.executable, *command]
        preload = () if command[0] == "sh" else preload
        env = {"PYTEST_CURRENT_TEST": "", **(env or {})}  # else every test had an environment, and so a preloaded Python, of its own
        return self.lab.run(argv, order=self.order, timeout=timeout, preload=preload, env=env, **more)

    def json(self, result) -> list[dict]:
        """The JSON line that each rank printed last, in rank order as the script saw it."""
        assert result.returncode == 0, result.outputs
        lines = [json.loads(result.stdout[rank].strip().splitlines()[-1]) for rank in result.stdout]
        return sorted(lines, key=lambda line: line["rank"])

    def sent(self, before) -> dict[str, dict[str, float]]:
        """MB that every NIC sent since the counters `before`."""
        after = self.lab.counters()
        return {node: {nic: (after[node][nic][1] - before[node][nic][1]) / 1e6 for nic in nics} for node, nics in after.items()}


@pytest.fixture(scope="session")
def two_clusters():
    """2 nodes with InfiniBand, 2 with RoCE."""
    with Lab(load_spec(CLUSTER)) as lab:
        yield LabOf(CLUSTER, lab)
