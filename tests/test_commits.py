"""CONTRIBUTING's example commits (tests/commits), each applied in a copy of the tree.

Each touches as few files as CONTRIBUTING says, and does what it is for.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import clusters
import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMITS = ROOT / "tests" / "commits"
CLUSTER = clusters.toml("a qib 100Gb/s a[0-1]", "b ib 100Gb/s b[0-1]", ethernet="10Gb/s")
NIC_KIND = """
from pathlib import Path
import sysfs_builder
from holmes_ext.cluster.sysfs.node import read_nics
from holmes_ext.cli.main import main
tree = sysfs_builder.dgx_a100(Path("tree"))
hca = next(iter(sorted((tree / "class/infiniband").iterdir()))).name
uevent = tree / "class/infiniband" / hca / "device" / "uevent"
uevent.write_text(uevent.read_text().replace("DRIVER=mlx5_core", "DRIVER=ib_qib"))
kinds = {nic.device: nic.kind for nic in read_nics(tree)}
assert kinds[hca] == "qib" and set(kinds.values()) == {"qib", "ib", "roce", "ethernet"}, kinds
assert main(["plan", "--cluster", "c.toml", "--pipeline", "2"]) == 0
"""
OUTER = """
import torch
from holmes_ext.join.settings import parse_outer
algorithm = parse_outer("algorithm=sign,every=8").outer_algorithm()
anchor = torch.zeros(3)
algorithm.step(anchor, None, torch.tensor([2.0, -0.5, 0.0]), 0.0)
assert torch.equal(anchor, torch.tensor([-1e-3, 1e-3, 0.0])), anchor
"""
COMMAND = """
from holmes_ext.cli.main import main
assert main(["units", "100Gb/s"]) == 0
"""
COST_TERM = """
import clusters, prices
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.price import LAUNCH_S
from holmes_ext.plan.sizes import Sizes
site = clusters.site()
gpt = Model(layers=4, hidden=256, heads=4, sequence=64, vocabulary=1000, micro_batches=2)
costs = prices.costs_on_site(site, [node.name for node in site.nodes], Sizes(), gpt)
assert all(seconds > LAUNCH_S for seconds in costs.forward_s[0])
"""
CODEC = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "runtime")!r})
from ranks import run_ranks
from test_compress import HierarchicalAllReduce, site, sums, sums_on_site
from holmes_ext.options import Options
four = site("a ib 2Gb/s a[0-3]", "b ib 2Gb/s b[0-3]", ethernet="50Mb/s")
compress = [Options(compress_gradients=how).compress_gradients for how in ("int8", "fp8")]
int8, fp8 = (sums_on_site(four, compress=how).hierarchical.seconds(1e7) for how in compress)
assert fp8 < int8, "no scales travel"
sent = {{}}
for how in ("off", "fp8"):
    found = run_ranks(sums, 4, HierarchicalAllReduce, [[0, 1], [2, 3]], how, 2, 4096)
    assert all(worst < 0.2 and same for worst, same, *_ in found), found
    sent[how] = found[0][-1]
assert sent["fp8"] == sent["off"] / 4, sent
"""
DOCTOR_CHECK = """
from pathlib import Path
from holmes_ext.doctor import node
from holmes_ext.doctor.numa_balancing import check_numa_balancing
assert node.check_numa_balancing is check_numa_balancing
file = Path("numa_balancing")
assert not list(check_numa_balancing(file)), "a kernel without NUMA"
file.write_text("0\\n")
assert not list(check_numa_balancing(file))
file.write_text("1\\n")
(finding,) = check_numa_balancing(file)
assert finding.level == "note" and "numa_balancing is 1" in finding.what, finding
"""
#: Commit -> (files that it may touch, what then works, texts that it prints).
CASES = {
    "nic_kind": (3, NIC_KIND, ["a[0-1]"]),
    "outer_algorithm": (1, OUTER, []),
    "command": (2, COMMAND, ["100 Gb/s"]),
    "cost_term": (2, COST_TERM, []),
    "doctor_check": (2, DOCTOR_CHECK, []),
    "codec": (3, CODEC, []),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Copy the package, without the C++ of the emulated GPU."""
    place = tmp_path_factory.mktemp("tree")
    skipped = shutil.ignore_patterns("__pycache__", "csrc")
    shutil.copytree(ROOT / "holmes_ext", place / "holmes_ext", symlinks=True, ignore=skipped)
    shutil.copytree(ROOT / "patches", place / "patches", ignore=skipped)
    (place / "c.toml").write_text(CLUSTER)
    return place


def git_apply(tree, patch, *flags):
    command = ["git", "apply", "-C1", *flags, str(patch)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    way_out = f"your change touches the lines of tests/commits/{patch.name}: update it"
    assert done.returncode == 0, f"{way_out}\n{done.stderr}"


@pytest.mark.parametrize("name", CASES)
def test_an_example_commit_applies_and_works(name, tree):
    most, script, said = CASES[name]
    patch = COMMITS / f"{name}.patch"
    assert len(re.findall("^diff --git", patch.read_text(), re.M)) <= most
    git_apply(tree, patch)
    try:
        environ = {**os.environ, "PYTHONPATH": f"{tree}:{ROOT / 'tests'}"}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tree, env=environ, capture_output=True, text=True
        )
    finally:
        git_apply(tree, patch, "-R")
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in said), done.stdout


def test_contributing_names_them_all():
    named = re.findall(r"tests/commits/(\w+)\.patch", (ROOT / "CONTRIBUTING.md").read_text())
    patches = {path.stem for path in COMMITS.iterdir()}
    assert set(named) == patches == set(CASES)
