"""Tests ranks that are forked from a Python that has imported torch.

They must compute like started processes. A module that uses a GPU during its import is refused.
"""

import os

import pytest

from holmes_ext.errors import HolmesError

SUM = """import os, torch, torch.distributed as dist, json
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.full((10,), float(dist.get_rank()), device="cuda")
dist.all_reduce(x)
free, total = torch.cuda.mem_get_info()
print(json.dumps([x.tolist(), torch.cuda.device_count(), total, os.getppid()]))
"""


@pytest.fixture
def script(tmp_path):
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_forked_ranks_compute_as_started_ones(lab, script):
    path = script("sum.py", SUM)
    forked = lab.run(path, order="a0,a1", preload=("torch",)).json
    started = lab.run(path, order="a0,a1", preload=()).json
    expected = [[6.0] * 10, 2, 4096 << 20]  # sums, number of GPUs, bytes of GPU memory
    assert [line[:3] for line in forked] == [expected] * 4
    assert [line[:3] for line in started] == [expected] * 4


def test_a_module_may_count_gpus_while_it_is_imported(lab, script, tmp_path):
    script(
        "counts.py",
        "import torch\nassert torch.cuda.is_available() and torch.cuda.device_count() == 2\n",
    )
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ran = lab.run(
        script("sum.py", f"import counts\n{SUM}"),
        order="b0,b1",
        preload=("torch", "counts"),
        env=env,
    )
    assert [line[0] for line in ran.json] == [[6.0] * 10] * 4


def test_a_module_that_uses_a_gpu_while_it_is_imported_is_refused(lab, script, tmp_path):
    script("uses.py", "import torch\ntorch.zeros(3, device='cuda')\n")
    env = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with pytest.raises(
        HolmesError, match="--preload torch,uses: uses: it uses a GPU while it is imported"
    ):
        lab.run(script("sum.py", SUM), order="b0,b1", preload=("torch", "uses"), env=env)
