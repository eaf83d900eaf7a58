"""Every process group of 16,384 ranks: planned, made by megatron-core's own RankGenerator, and compared."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from integration_tests.jobs import full, some

ROOT = Path(__file__).parents[3]
CODE = """
import json, sys
from megatron.core.parallel_state import RankGenerator
from holmes_ext.cluster.site import ETHERNET, site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import groups
from holmes_ext.plan.sizes import Sizes

site = site_from_spec(load_spec(sys.argv[1]))
sizes = Sizes(**json.loads(sys.argv[2])).complete(site.world_size)
plan = build_plan(site, sizes)
grid = dict(tp=sizes.tensor, pp=sizes.pipeline, order=sizes.order)
dense = RankGenerator(ep=1, dp=sizes.data, cp=sizes.context, **grid)
model = sizes.tensor * sizes.expert * sizes.pipeline
expert = RankGenerator(ep=sizes.expert, dp=site.world_size // model, cp=1, **grid)
axes = {"data": "dp-cp", "dp": "dp", "tensor": "tp", "context": "cp", "pipeline": "pp", "model": "tp-pp",
        "tensor and data": "tp-dp"}
made = {name: dense.get_ranks(axis) for name, axis in axes.items()}
made |= {name: expert.get_ranks(axis) for name, axis in
         {"expert": "ep", "expert data": "dp", "expert tensor": "tp"}.items()}
differ = [kind for kind in ("data", "tensor", "context", "pipeline", "expert")
          if sorted(map(tuple, made[kind])) != sorted(groups(sizes, kind))]
cluster_of = [site.node_by_name[plan.node_of(rank)].cluster for rank in range(site.world_size)]
assert sorted(plan.nodes) == sorted(node.name for node in site.nodes)
crossing = {kind: sum(len({cluster_of[rank] for rank in group}) > 1 for group in found) \
for kind, found in made.items()}
json.dump({"world": site.world_size, "groups": sum(map(len, made.values())), "differ": differ, \
"crossing": crossing,
           "spanning": {span.kind: span.groups for span in plan.spanning}}, sys.stdout)
"""
#: (sizes, kinds of groups that no order of the nodes keeps inside a cluster of 2,048 GPUs)
JOBS = {
    "tensor 8, pipeline 8": ({"tensor": 8, "pipeline": 8}, set()),
    "context 4, expert 8": ({"tensor": 4, "context": 4, "pipeline": 32, "expert": 8}, set()),
    "pipeline 4": ({"tensor": 8, "pipeline": 4}, {"data"}),
}


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("job", some(JOBS, "tensor 8, pipeline 8"))
def test_all_groups_of_16384_ranks(job):
    sizes, unavoidable = JOBS[job]
    cluster = ROOT / "examples" / "clusters" / "eight_clusters_16384.toml"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(cluster), json.dumps(sizes)],
        capture_output=True,
        text=True,
        cwd=ROOT / "tests",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["world"] == 16384 and not report["differ"], report
    assert set(report["spanning"]) == unavoidable, report
    for kind in ("data", "tensor", "context", "expert"):
        assert report["crossing"][kind] == report["spanning"].get(kind, 0), (kind, report)
    if not unavoidable:
        assert not any(
            report["crossing"][kind]
            for kind in ("dp", "tensor and data", "expert data", "expert tensor")
        ), report


ORDERS = """
import itertools, json, sys
from megatron.core.parallel_state import RankGenerator
from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import groups
from holmes_ext.plan.sizes import Sizes

differ, compared, taken = [], 0, []
for axes in itertools.permutations(("tp", "cp", "ep", "dp", "pp")):
    for asked in (dict(tensor=2, context=2, pipeline=2), dict(pipeline=3, expert=2),
                  dict(tensor=2, pipeline=2, expert=3), dict(context=3, expert=6)):
        order, world = "-".join(axes), 24
        sizes = Sizes(**asked, order=order).complete(world)
        grid = dict(tp=sizes.tensor, pp=sizes.pipeline, order=order)
        dense = RankGenerator(ep=1, dp=sizes.data, cp=sizes.context, **grid)
        model = sizes.tensor * sizes.expert * sizes.pipeline
        expert = RankGenerator(ep=sizes.expert, dp=world // model, cp=1, **grid)
        if axes[-1] != "pp" and dense.get_ranks("pp") != expert.get_ranks("pp"):
            continue  # megatron-core refuses it
        made = {"data": dense.get_ranks("dp-cp"), "tensor": dense.get_ranks("tp"),
                "context": dense.get_ranks("cp"), "pipeline": dense.get_ranks("pp"),
                "expert": expert.get_ranks("ep")}
        for kind, found in made.items():
            compared += 1
            if sorted(map(sorted, found)) != sorted(map(sorted, groups(sizes, kind))):
                differ.append([order, asked, kind])
# Axes of size 1 may be left out, and so may any by RankGenerator's own rule; case does not matter to it.
for order in ("dp-pp", "tp-dp", "pp-tp-dp", "TP-CP-EP-DP-PP", "dp-dp", "tp-dp-xx", "", "tp_dp", "tp-pp"):
    sizes = dict(tensor=2, pipeline=2 if "pp" in order.lower() else 1)
    answers = []
    grid = dict(tp=2, ep=1, dp=8 // 2 // sizes["pipeline"], pp=sizes["pipeline"], cp=1, order=order)
    for make in (lambda: RankGenerator(**grid).get_ranks("dp"),
                 lambda: Sizes(**sizes, order=order.lower()).complete(8)):
        try:
            make()
            answers.append(True)
        except (HolmesError, RuntimeError, AssertionError, ValueError, KeyError):
            answers.append(False)
    taken.append([order, *answers])
json.dump({"differ": differ, "compared": compared, "taken": taken}, sys.stdout)
"""


@full
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_every_order_gives_rank_generators_groups():
    """All 120 orders of the axes give RankGenerator's groups, with context and expert sizes.

    Some orders leave axes out or cannot be read.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ORDERS],
        capture_output=True,
        text=True,
        cwd=ROOT / "tests",
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert not report["differ"] and report["compared"] > 1000, report
    assert all(theirs == ours for _, theirs, ours in report["taken"]) and {
        ours for _, _, ours in report["taken"]
    } == {True, False}, report["taken"]
