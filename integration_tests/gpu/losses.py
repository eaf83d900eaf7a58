"""Writes the losses of three examples on two clusters, without and with holmes, as JSON.

Comparing two such files shows whether the emulated GPU computes like a physical one. The examples train on
the text of Python's own modules, so use one version of Python for both.

    PYTHONPATH=tests:. HOLMES_TEST_CARRIER=nccl .venv-gpu/bin/python integration_tests/gpu/losses.py OUT.json
    PYTHONPATH=tests:. HOLMES_TEST_CARRIER=cuda python ...                          on a physical GPU
    python integration_tests/gpu/losses.py --compare A.json B.json
"""

import json
import sys
import tempfile
from pathlib import Path

from holmes_lab import Lab

from holmes_ext.cluster.spec import load_spec
from integration_tests.jobs import CLUSTER, ON_CPU, ROOT, SIZE, TRAIN, LabOf, losses

EXAMPLES = ROOT / "examples"
JOBS = {
    "plain torch": (str(EXAMPLES / "plain_torch" / "train.py"),),
    "DeepSpeed's pipeline": (TRAIN, "--stages", "2"),
    "DeepSpeed's pipeline, ZeRO 1, bf16": (
        TRAIN,
        "--stages",
        "2",
        "--zero",
        "1",
        "--dtype",
        "bf16",
    ),
    "megatron-core": (str(EXAMPLES / "megatron_core" / "train.py"), "--pipeline", "2"),
}


def train_all() -> dict[str, list[float]]:
    """Train each job without and with holmes, and return {"job, stock or holmes": losses}."""
    losses_of = {}
    with Lab(load_spec(CLUSTER)) as lab, tempfile.TemporaryDirectory() as folder:
        clusters = LabOf(CLUSTER, lab)
        for job, words in JOBS.items():
            for name, flags in (("stock", ()), ("holmes", clusters.holmes)):
                log = Path(folder, f"{job} {name}")
                result = clusters.run(
                    *words,
                    *SIZE,
                    "--log-file",
                    str(log),
                    *flags,
                    preload=("torch",),
                    env={"PYTHONPATH": ON_CPU},
                )
                if result.returncode:
                    sys.exit(f"{job}, {name}: {result.outputs}")
                losses_of[f"{job}, {name}"] = losses(log)
    return losses_of


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        first, second = (json.loads(Path(name).read_text()) for name in sys.argv[2:])
        for name in first:
            pairs = zip(first[name], second[name], strict=True)
            print(f"{max(abs(a - b) for a, b in pairs):.1e}  {name}")
    else:
        Path(sys.argv[1]).write_text(json.dumps(train_all(), indent=1) + "\n")
