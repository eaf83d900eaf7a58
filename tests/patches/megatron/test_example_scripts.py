"""Tests how holmes finds and reads command lines in example scripts of Megatron-LM and Megatron-DeepSpeed.

A shell script computes its command line from variables and files. benchmarks/example_scripts.py runs the
script with a launcher that only records the command line. `describe` reads the model and the parallel sizes
from it.
"""

import sys
from pathlib import Path

import pytest
from checkouts import checkout_or_skip

from holmes_ext.patches.megatron.command_line.describe import describe

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))
import example_scripts  # noqa: E402
from example_scripts import command_lines  # noqa: E402

SCRIPTS = {
    "train.sh": "SIZE=2\nARGS=(\n  --num-layers 4 --pipeline-model-parallel-size ${SIZE}\n)\nrm -r /\n"
    "torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]} --load <path to it>/x &> "
    "/nowhere/log\n",
    "config.sh": 'cat <<EOT > ds.json\n{"train_batch_size": 8}\nEOT\n'
    'eval "deepspeed --num_gpus 8 ../pretrain_gpt.py --num-layers 6 '
    '--deepspeed_config=ds.json"\n',
    "queue.sh": 'sbatch <<EOT\nsrun bash -c "python -u /x/pretrain_gpt.py --num-layers \\\\\n 8 '
    '--bf16"\nEOT\n',
    "bert.sh": "torchrun pretrain_bert.py --num-layers 24\n",
    "loops.sh": "# pretrain_gpt\nwhile true; do sleep 1; done\n",
}


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout" / "examples"
    folder.mkdir(parents=True)
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    (tmp_path / "configs").mkdir()
    return folder.parent


def test_scripts_give_their_launchers_command_lines(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(example_scripts, "LIMIT_S", 1)
    found = dict(command_lines(checkout, tmp_path / "configs"))
    assert set(found) == {"examples/train.sh", "examples/config.sh", "examples/queue.sh"}
    assert found["examples/train.sh"][:4] == [
        "--num-layers",
        "4",
        "--pipeline-model-parallel-size",
        "2",
    ]
    flag, path = found["examples/config.sh"][-2:]
    assert flag == "--deepspeed_config" and Path(path).read_text() == '{"train_batch_size": 8}\n'
    assert found["examples/queue.sh"][:2] == ["--num-layers", "8"] and "--bf16" in " ".join(
        found["examples/queue.sh"]
    )


@pytest.mark.full(share=4)
@pytest.mark.parametrize("name, minimum", [("Megatron-LM", 15), ("Megatron-DeepSpeed", 60)])
def test_every_example_script_is_read_whole(name, minimum, tmp_path):
    """All flags in a checkout's scripts are known, and at least `minimum` scripts give a model."""
    descriptions = []
    for _, arguments in command_lines(checkout_or_skip(name), tmp_path):
        descriptions.append(describe(arguments))
    with_model = [description for description in descriptions if description.model is not None]
    assert len(with_model) >= minimum
    unknown_flags = {flag for description in descriptions for flag in description.unknown}
    assert not unknown_flags
