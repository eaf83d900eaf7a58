"""DeepSpeed's checkpoints over partitions: refused in one line with the way out; by that way the training goes on as if never stopped."""

import json
import os
import shutil
import subprocess
import sys

from integration_tests.deepspeed.test_two_clusters import SIZE, TRAIN

STEPS = 4


def run(two_clusters, log, partition, *flags, expect=0):
    result = two_clusters.run(
        TRAIN, *SIZE, "--steps", str(STEPS), "--zero", "1", "--log", str(log), "--stages", "2", "--holmes", "--holmes-cluster", str(two_clusters.file),
        "--holmes-sizes", "pipeline=2", "--holmes-partition", partition, *flags, preload=("torch", "deepspeed"), env={"DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    text = "".join(result.outputs.values())
    assert result.returncode == expect, text
    return text


def losses(log):
    return {entry["step"]: entry["loss"] for entry in map(json.loads, log.read_text().splitlines())}


def test_zero_1_under_another_partition(two_clusters, tmp_path):
    saved = tmp_path / "saved"
    run(two_clusters, tmp_path / "whole", "3,1", "--save", str(saved), "--save-every", "2")
    whole = losses(tmp_path / "whole")
    assert set(whole) == {1, 2, 3, 4}
    shutil.rmtree(saved / "step4")
    (saved / "latest").write_text("step2")
    text = run(two_clusters, tmp_path / "refused", "1,3", "--load", str(saved), expect=2)
    assert "was saved with stages of 5+3 modules, this job has stages of 3+5 modules" in text and "Traceback" not in text, text
    assert "resume with --holmes-partition 3,1, or convert it once: python -m deepspeed.checkpoint.ds_to_universal" in text, text

    folder = str(saved / "step2")
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", folder, "--output_folder", f"{folder}_universal"]
    done = subprocess.run([*convert, "--inject_missing_state"], capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "ds.json").write_text(json.dumps({"checkpoint": {"load_universal": True}}))
    run(two_clusters, tmp_path / "resumed", "1,3", "--load", str(saved), "--deepspeed_config", str(tmp_path / "ds.json"))
    resumed = losses(tmp_path / "resumed")
    assert set(resumed) == {3, 4} and all(abs(resumed[step] - whole[step]) <= 1e-6 for step in resumed), (whole, resumed)
