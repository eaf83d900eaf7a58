"""Tests that a DeepSpeed checkpoint of another partition into stages is refused, and can be converted.

The refusal is a message of one line that names the way out, and a job must resume by it.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from integration_tests.jobs import full, train

SIZE = (
    "--layers 4 --hidden 128 --heads 4 --sequence 16 --micro-batch 2 --micro-batches 4 --steps 4 --stages "
    "2".split()
)


def trained(clusters, log, partition, *flags, expect=0):
    """Run a job with this partition, and return the lines that it printed.

    The losses by step are in the log.
    """
    holmes = (*clusters.holmes, "--holmes-sizes", "pipeline=2", "--holmes-partition", partition)
    return train(clusters, log, "--zero", "1", *holmes, *flags, size=SIZE, expect=expect)


def by_step(log):
    return {entry["step"]: entry["loss"] for entry in map(json.loads, log.read_text().splitlines())}


@full
def test_zero_1_under_another_partition(two_clusters, tmp_path):
    saved = tmp_path / "saved"
    trained(two_clusters, tmp_path / "whole", "3,1", "--save", str(saved), "--save-every", "2")
    whole = by_step(tmp_path / "whole")
    assert set(whole) == {1, 2, 3, 4}
    shutil.rmtree(saved / "step4")
    (saved / "latest").write_text("step2")
    text = trained(two_clusters, tmp_path / "refused", "1,3", "--load", str(saved), expect=2)
    assert (
        "saved with stages of 5+3 modules" in text and "this job has stages of 3+5 modules" in text
    ), text
    assert "resume with --holmes-partition 3,1" in text and "Traceback" not in text, text

    folder = str(saved / "step2")
    way_out = "-m deepspeed.checkpoint.ds_to_universal"
    assert f"python {way_out}" in text
    convert = [
        sys.executable,
        *way_out.split(),
        "--input_folder",
        folder,
        "--output_folder",
        f"{folder}_universal",
    ]
    done = subprocess.run(
        [*convert, "--inject_missing_state"],
        capture_output=True,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "ds.json").write_text(json.dumps({"checkpoint": {"load_universal": True}}))
    config = ("--deepspeed_config", str(tmp_path / "ds.json"))
    trained(two_clusters, tmp_path / "resumed", "1,3", "--load", str(saved), *config)
    assert by_step(tmp_path / "resumed") == pytest.approx(
        {step: whole[step] for step in (3, 4)}, abs=1e-6
    )
