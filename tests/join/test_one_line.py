"""A program that cannot join ends with one line and status 2, whatever keeps it from it."""

import os
import subprocess
import sys

import pytest
import torch
from joined_jobs import coordinator, place_at

from holmes_ext.join.join import join, weights_of
from holmes_ext.join.patches import torch as joined
from holmes_ext.join.settings import parse_outer
from integration_tests.jobs import full

SCRIPT = """
import torch
model = torch.nn.Linear(3, {width})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
print("stepped")
"""


@pytest.fixture(scope="module")
def port():
    """Of a coordinator where job first trains nn.Linear(3, 4)."""
    with coordinator() as server:
        optimizer = torch.optim.SGD(torch.nn.Linear(3, 4).parameters(), lr=0.1)
        first = join(
            place_at("first", server.port),
            parse_outer("every=4").for_optimizer(None),
            lambda: weights_of(joined.weights_of(optimizer)),
            {"framework": "torch"},
            torch.device("cpu"),
        )
        first.begin()
        yield server.port
        first.end()


@pytest.mark.parametrize(
    "name, outer, why",
    [
        ("first", "every=4", "there is a job named 'first' in this run already"),
        pytest.param(
            "west",
            "every=4,lr=0.5",
            "it differs from job 'first' in outer lr (0.5 here, 1.0 in first)",
            marks=full,
        ),
        pytest.param(
            "west",
            "every=4,min=3,timeout=1",
            "has waited 1 s for min=3 jobs, but there are only first, west",
            marks=full,
        ),
        pytest.param(
            "west",
            "every=6,fragments=4",
            "every=6 is not divisible by fragments=4",
            marks=full,
        ),
    ],
)
def test_one_line_and_status_2(name, outer, why, port, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(width=4))
    flags = [
        "--holmes-join",
        f"{name}@127.0.0.1:{port}",
        "--holmes-outer",
        outer,
        "--holmes-preflight",
        "off",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), *flags],
        env=environment,
        text=True,
        timeout=90,
        capture_output=True,
    )
    assert (
        done.returncode == 2 and "stepped" not in done.stdout and "Traceback" not in done.stderr
    ), done.stderr
    (line,) = [line for line in done.stderr.splitlines() if why in line]
    assert line.startswith("holmes: ")


def test_another_model_is_named_tensor_by_tensor(port, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.format(width=5))
    flags = [
        "--holmes-join",
        f"west@127.0.0.1:{port}",
        "--holmes-outer",
        "every=4",
        "--holmes-preflight",
        "off",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), *flags],
        env=environment,
        text=True,
        timeout=90,
        capture_output=True,
    )
    what = (
        "it differs from job 'first' in weights at all ranks group 0 parameter 0 ([5, 3] torch.float32 "
        "here, [4, 3]"
    )
    assert done.returncode == 2 and what in done.stderr, done.stderr
