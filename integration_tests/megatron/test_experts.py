"""Tests experts that are placed by `holmes plan --experts`.

The losses must not change, and fewer bytes must cross between the clusters.
"""

import json
import subprocess
import sys

import pytest

from integration_tests.jobs import ON_CPU, PRELOAD_MEGATRON, ROOT, SCRIPTS, full

pytest.importorskip("scipy")


def trained(clusters, out, *flags, returncode=0):
    """Run scripts/experts.py; return what it wrote, the MB sent over Ethernet, and the output."""
    before = clusters.lab.counters()
    result = clusters.run(
        str(SCRIPTS / "experts.py"),
        str(out),
        *flags,
        preload=PRELOAD_MEGATRON,
        timeout=300,
        env={"PYTHONPATH": ON_CPU, "OMP_NUM_THREADS": "1"},
    )
    text = "\n".join(result.outputs.values())
    assert result.returncode == returncode, text[-3000:]
    crossed = sum(nics["eth0"] for nics in clusters.sent(before).values())
    return (json.loads(out.read_text()) if out.exists() else None), crossed, text


@full
def test_experts_live_near_their_tokens_and_learn_the_same(two_clusters, tmp_path):
    sizes = ("--holmes-sizes", "expert=4")
    stock, crossed, _ = trained(two_clusters, tmp_path / "stock.json", *two_clusters.holmes, *sizes)
    traffic = tmp_path / "traffic.json"
    order = tmp_path / "experts.json"
    traffic.write_text(json.dumps({"version": 1, "rows": "rank", "counts": stock["counts"]}))
    plan = [
        sys.executable,
        "-m",
        "holmes_ext.cli.main",
        "plan",
        "--cluster",
        two_clusters.holmes[-1],
        "--sizes",
        "expert=4",
        "--experts",
        str(traffic),
        "--experts-output",
        str(order),
        "--experts-balance",
        "4",
    ]
    done = subprocess.run(plan, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 and "written" in done.stdout, done.stdout + done.stderr
    assert json.loads(order.read_text())["order"] != list(range(8))
    placed, crossed_when_placed, output = trained(
        two_clusters,
        tmp_path / "placed.json",
        *two_clusters.holmes,
        *sizes,
        "--holmes-experts",
        str(order),
    )
    assert "megatron-experts" in output
    assert placed["losses"] == pytest.approx(stock["losses"], abs=1e-6)
    assert crossed_when_placed < 0.7 * crossed, (crossed_when_placed, crossed)


@full
def test_an_order_of_another_size_is_refused_in_one_line(two_clusters, tmp_path):
    order = tmp_path / "experts.json"
    order.write_text(json.dumps({"version": 1, "ranks": 2, "order": [1, 0, 3, 2]}))
    flags = (*two_clusters.holmes, "--holmes-sizes", "expert=4", "--holmes-experts", str(order))
    _, _, said = trained(two_clusters, tmp_path / "none.json", *flags, returncode=2)
    assert (
        "experts.json, MoE layer 1: it is for 4 experts on 2 ranks, this layer has 8 on 4" in said
    )
    assert "Traceback" not in said
