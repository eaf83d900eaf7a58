"""megatron/unused: against a made-up Megatron-DeepSpeed, in a Python of its own."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("torchvision") is not None, reason="torchvision is installed"
)
ROOT = Path(__file__).parents[3]
#: What stands in a checkout, shortened, and a deepspeed without compression.compress.
FILES = {
    "megatron/__init__.py": "import megatron.arguments\n",
    "megatron/arguments.py": "import deepspeed\n",
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": "__version__ = '0.2.0'\n",
    "megatron/training.py": """
from deepspeed.compression.compress import init_compression, redundancy_clean
import torchvision.transforms as T
from torchvision import datasets
from torchvision.datasets import VisionDataset
class Images(VisionDataset):
    pass
def resize():
    return T.Resize()
""",
    "deepspeed/__init__.py": "",
    "deepspeed/compression/__init__.py": "",
}
MAIN = """
import sys
from holmes_ext.errors import HolmesError
from holmes_ext.patches import registry
registry().enable(["megatron-deepspeed-imports"], disabled=frozenset({disabled}))
import megatron.training as training
for call in (training.init_compression, training.Images, training.resize, training.datasets):
    try:
        call()
    except HolmesError as error:
        print(error)
try:
    from torchvision import ops
except ImportError as error:
    print("others:", error)
registry().undo()
try:
    import torchvision.io
except ImportError as error:
    print("undone:", error)
"""


@pytest.fixture
def run(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def start(disabled=""):
        script = MAIN.replace("{disabled}", disabled)
        return subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""},
        )

    return start


def test_what_is_missing_is_served_to_megatron_alone(run):
    done = run()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "init_compression of deepspeed.compression.compress.init_compression is used, but deeps"
    )
    assert "'deepspeed<0.19.7'" in lines[0]
    assert [line.split(" is used, but ")[0] for line in lines[1:4]] == [
        "VisionDataset of torchvision.datasets",
        "Resize of torchvision.transforms",
        "datasets of torchvision.datasets",
    ]
    assert lines[4].startswith("others: cannot import name 'ops'") and lines[5].startswith(
        "undone: No module named"
    )


def test_switched_off_it_is_missing(run):
    done = run("['megatron-deepspeed-imports']")
    assert (
        "No module named 'deepspeed.compression.compress'" in done.stderr and done.returncode == 1
    )
