"""Every file that holmes reads, damaged on disk in 10,000 ways: a value or one clear line that names the file; no traceback, no hang.

Sysfs trees take 2,500 of them (with tests/test_sysfs.py's damages, which need links and FIFOs), the others 1,500 each.
"""

import json
import os
import random
from pathlib import Path

import pytest

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.doctor.side_by_side import NodeCheck, load_check
from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.plan.cost.model import load_model
from holmes_ext.plan.plan import check_plan, load_plan
from tests.cluster.sysfs.test_sysfs import fuzz
from tests.doctor.test_nics import ETHERNET, IB, ROCE
from tests.plan.test_plan import SITE, plan

ROOT = Path(__file__).parents[1]
ROUNDS = 1500
JUNK = [b'"', b"[", b"]", b"{", b"}", b"=", b",", b"\n", b"-1", b"1e999", b"NaN", b"9" * 500, b"null", b"true", b"[[", b"'''", b"\x00", b"\xff\xfe", "é".encode(),
        b'"' + b"a" * 3000 + b'"', b"[" * 2000, b'{"a":' * 1500, b"0x10", b"2026-01-01", b"[0-99999999]", b'""', b"{}", b"[]"]  # fmt: skip


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` after one to four cuts, insertions, exchanges of lines or single bytes."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice((0, 1, 3, 20, 200)))
        action = rng.randrange(6)
        if action == 0:
            data = data[:start] + data[stop:]
        elif action == 1:
            data = data[:start] + rng.choice(JUNK) + data[stop:]
        elif action == 2 and rng.random() < 0.3:
            data = data[:start]
        elif action == 3 and data:
            at = rng.randrange(len(data))
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif action == 4:
            lines = data.split(b"\n")
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
            data = b"\n".join(lines)
        else:
            data = data[:start] + data[start:stop] * 2 + data[stop:]
    return data


def use_spec(path):
    site_from_spec(load_spec(path))


def use_ds_config(path):
    config = ds_config.from_arguments(["--deepspeed_config", str(path)])
    ds_config.check(config, plan())


def check_document():
    node = NodeReport("a0", "boot/1", "eth0", (IB, ROCE, ETHERNET), 1)
    return json.dumps(NodeCheck(node, {"torch": "2.13.0"}, {"NCCL_IB_HCA": "mlx5_0"}, ()).to_dict(), indent=1).encode()


FILES = {
    "cluster.toml": (lambda: (ROOT / "examples/clusters/two_clusters_4.toml").read_bytes(), use_spec),
    "plan.json": (lambda: plan().to_json().encode(), lambda path: check_plan(load_plan(path), SITE)),
    "model.toml": (lambda: (ROOT / "examples/models/gpt_7.5b.toml").read_bytes(), load_model),
    "check.json": (check_document, load_check),
    "ds_config.json": (lambda: json.dumps({"train_batch_size": 8, "pipeline": {"stages": 2, "partition": "best"}, "zero_optimization": {"stage": 1, "overlap_comm": True}}).encode(), use_ds_config),
}  # fmt: skip


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
            assert str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 1500, (data, str(error))
    assert name == "ds_config.json" or refused > ROUNDS / 4  # what is no JSON is DeepSpeed's to refuse


def test_damaged_sysfs_trees(tmp_path):
    read, refused = fuzz(tmp_path, rounds=10_000 - ROUNDS * len(FILES), seed=int(os.environ.get("HOLMES_TEST_SEED", "7")))
    assert read > 300 and refused > 300
