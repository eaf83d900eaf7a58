"""lab/process/ranks.py: what a job's command says of it."""

import pytest
from holmes_lab.process.ranks import asks_for_holmes


@pytest.mark.parametrize(
    "command, env, expected",
    [
        ("python train.py --holmes", {}, True),
        ("python train.py", {"HOLMES": "1"}, True),
        ("python -m holmes_ext train.py", {}, True),
        ("/venv/bin/holmes probe --cluster c.toml", {}, True),
        ("python train.py --out /home/holmes", {"HOLMES": "0"}, False),
    ],
)
@pytest.mark.parametrize("shell", [False, True])
def test_jobs_under_holmes_are_known(command, env, expected, shell):
    assert asks_for_holmes(["sh", "-c", command] if shell else command.split(), env) == expected
