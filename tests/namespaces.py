"""A script in a network namespace of its own, for tests."""

import os
import shutil
import subprocess
import sys

import pytest


def in_namespace(script: str, *setup: str) -> str:
    """Run a Python script in a new network namespace, and return its output.

    The test is skipped without root.

    Args:
        setup: Shell lines that prepare the namespace, such as "ip link add ...".
    """
    if not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("needs unshare (util-linux) and ip (iproute2)")
    shell = "\n".join(["set -e", "ip link set lo up", *setup, 'exec "$PYTHON" -c "$SCRIPT"'])
    env = {
        **os.environ,
        "PYTHON": sys.executable,
        "SCRIPT": script,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    try:
        done = subprocess.run(
            ["unshare", "--net", "--mount", "bash", "-c", shell],
            env=env,
            text=True,
            capture_output=True,
            timeout=60,
        )
    except OSError as error:
        pytest.skip(f"cannot make a network namespace: {error}")
    if "unshare failed" in done.stderr:
        pytest.skip(f"cannot make a network namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


VETH = (
    "ip link add va type veth peer name vb",
    "ip addr add 10.1.2.3/20 dev va",
    "ip addr add fd01::3/64 dev va nodad",
    "ip link set va up",
    "ip link set vb up",
)
