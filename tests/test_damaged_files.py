"""Tests that holmes withstands damaged input files: plan.json, cluster.toml, reports of nodes, /sys, ...

Each kind of file is damaged at random 1,500 times (the files below /sys 2,500 times). Holmes must read the
file or end with a one-line error that names it. It must not hang.
"""

import json
import os
import random
from pathlib import Path

import clusters
import pytest
from damage import damaged, fuzz
from nics import ETHERNET, IB, ROCE

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.doctor.side_by_side import NodeCheck, load_check
from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.model import load_model
from holmes_ext.plan.plan import check_plan, load_plan
from holmes_ext.plan.sizes import Sizes

ROOT = Path(__file__).parents[1]
ROUNDS = 1500
SITE = clusters.site(processes=2)
PLAN = build_plan(SITE, Sizes(2, 2), stage_layers=(3, 5))


def use_spec(path):
    site_from_spec(load_spec(path))


def use_ds_config(path):
    config = ds_config.from_arguments(["--deepspeed_config", str(path)])
    ds_config.check(config, PLAN)


def check_document():
    node = NodeReport("a0", "boot/1", "eth0", (IB, ROCE, ETHERNET), 1)
    return json.dumps(
        NodeCheck(node, {"torch": "2.13.0"}, {"NCCL_IB_HCA": "mlx5_0"}, ()).to_dict(), indent=1
    ).encode()


DS_CONFIG = {
    "train_batch_size": 8,
    "pipeline": {"stages": 2, "partition": "best"},
    "zero_optimization": {"stage": 1, "overlap_comm": True},
}
FILES = {
    "cluster.toml": (
        lambda: (ROOT / "examples/clusters/two_clusters_4.toml").read_bytes(),
        use_spec,
    ),
    "plan.json": (lambda: PLAN.to_json().encode(), lambda path: check_plan(load_plan(path), SITE)),
    "model.toml": (lambda: (ROOT / "examples/models/gpt_7.5b.toml").read_bytes(), load_model),
    "check.json": (check_document, load_check),
    "ds_config.json": (lambda: json.dumps(DS_CONFIG).encode(), use_ds_config),
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path, name):
    make, use = FILES[name]
    path, good, rng = tmp_path / name, make(), random.Random(name)
    path.write_bytes(good)
    use(path)  # undamaged, it is read
    refused = 0
    for _ in range(ROUNDS):
        data = damaged(good, rng)
        path.write_bytes(data)
        try:
            use(path)
        except HolmesError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 1500, (
                data,
                str(error),
            )
    assert (
        name == "ds_config.json" or refused > ROUNDS / 4
    )  # what is no JSON is DeepSpeed's to refuse


def test_damaged_sysfs_trees(tmp_path, exhaustive):
    rounds = 2500 if exhaustive else 800
    read, refused = fuzz(tmp_path, rounds=rounds, seed=os.environ.get("HOLMES_TEST_SEED", 7))
    assert read > rounds / 10 and refused > rounds / 10
