"""Tests that a job starts with the flags that `holmes plan` prints for a plan which it has searched.

The job trains with DeepSpeed, and its losses must equal those of a job without holmes.
"""

import json
import re
import shlex

from holmes_ext.cli.main import main
from holmes_ext.plan.plan import load_plan
from integration_tests.jobs import fast, full, losses, same, train

SIZE = "--layers 4 --hidden 64 --heads 4 --sequence 16 --steps 4".split()
MODEL = """version = 1
layers = 4
hidden = 64
heads = 4
sequence = 16
vocabulary = 256
tied = false
[training]
global_batch = 16
activation_width = 4
gradient_width = 4
state_bytes = 16
[gpu]
flops = 1e9
[gpu.cluster.b]
flops = 4e8
"""


@full
def test_a_plan_of_the_search_starts_with_the_flags_it_prints(two_clusters, tmp_path, capsys):
    """Cluster b computes slower, so the best plan is a pipeline whose stage on b has fewer layers.

    The pipeline sends activations over the slow Ethernet between the clusters.
    """
    (tmp_path / "model.toml").write_text(MODEL)
    plan = tmp_path / "plan.json"
    config = tmp_path / "ds_config.json"
    command = [
        "plan",
        "--cluster",
        str(two_clusters.file),
        "--model",
        str(tmp_path / "model.toml"),
        "--for",
        "deepspeed",
    ]
    limits = ["--limit", "tensor=1", "--limit", "zero=0", "--limit", "recompute=none"]
    assert main([*command, *limits, "--output", str(plan)]) == 0
    printed = re.search(
        r"^deepspeed:\n  (.+)\n  ds_config.json: (.+)$", capsys.readouterr().out, re.MULTILINE
    )
    config.write_text(printed[2])
    flags = [str(config) if flag == "ds_config.json" else flag for flag in shlex.split(printed[1])]
    chosen = load_plan(plan)
    layers = dict(zip((chosen.nodes[0][0], chosen.nodes[2][0]), chosen.stage_layers))
    assert chosen.sizes.pipeline == 2 and layers["b"] < layers["a"]
    assert sorted(chosen.nodes[:2]) in (["a0", "a1"], ["b0", "b1"])
    stages = ("--stages", str(json.loads(printed[2])["pipeline"]["stages"]))
    train(two_clusters, tmp_path / "stock", *stages, "--deepspeed_config", str(config), size=SIZE)
    before = two_clusters.lab.counters()
    text = train(two_clusters, tmp_path / "holmes", *stages, *flags, size=SIZE)
    ours = losses(tmp_path / "holmes")
    assert len(ours) == 4 and ours[-1] < ours[0] and same(ours, losses(tmp_path / "stock"))
    assert f"{chosen.stage_layers[0] + 2}+{chosen.stage_layers[1] + 2} layers" in text, text
    for node, nics in two_clusters.sent(before).items():
        assert fast(nics) > nics["eth0"], (node, nics)
