"""torchtitan's own train.py over both clusters, on CPUs (torchtitan_cpu/sitecustomize.py): HSDP, and a pipeline.

`make stacks` installs version 0.2.2: 0.3.0 calls torch.distributed.set_timeout, which torch 2.13 does not have. With
torch 2.15 it runs what `pip install --no-deps --target build/torchtitan torchtitan==0.3.0 spmd_types
torch_checkpointing` puts there.
"""

import json
import re
import sys
from pydoc_data.topics import topics

import pytest

from integration_tests.jobs import ROOT, said

tokenizers = pytest.importorskip("tokenizers")
#: Where `make stacks` puts torchtitan and what it needs besides .venv.
INSTALLED = ROOT / "build" / "torchtitan"
pytestmark = pytest.mark.skipif(not INSTALLED.is_dir(), reason="make stacks")

CONFIG = """[job]
dump_folder = "out"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "tokenizer"
[training]
local_batch_size = 2
seq_len = 32
steps = 4
dataset = "c4_test"
dataset_path = "corpus"
mixed_precision_param = "float32"
[lr_scheduler]
warmup_steps = 2
[metrics]
log_freq = 1
[activation_checkpoint]
mode = "none"
[debug]
seed = 1
"""
#: A cache for each node of each run: ranks that make the same data set in one place at once disturb each other. (A data
#: set "text" would be a loader of `datasets` that takes all files of the folder, those caches among them.)
#: From 0.3 on a configuration is a function, which flags change.
FLAGS = ("--module llama3 --config llama3_debugmodel --hf-assets-path tokenizer --dump-folder out"
         " --dataloader.dataset c4_test --dataloader.dataset-path corpus --training.local-batch-size 2"
         " --training.seq-len 32 --training.steps 4 --training.mixed-precision-param float32 --metrics.log-freq 1"
         " --training.disable-cuda-graphs --debug.seed 1 --compile.no-enable {} activation-checkpoint:none")
LAUNCH = ("HF_HOME=$(mktemp -d -p .) exec"
          f" {sys.executable} -m torch.distributed.run --nproc-per-node 1 --nnodes 4 --node-rank $NODE_RANK"
          " --master-addr $MASTER_ADDR --master-port $MASTER_PORT -m torchtitan.train")
HSDP = "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2"
PIPELINE = ("--parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 2"
            " --parallelism.pipeline_parallel_schedule {}")
WAYS = {"HSDP": HSDP, "1F1B": PIPELINE.format("1F1B"), "breadth first": PIPELINE.format("LoopedBFS")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its configuration, a byte-level tokenizer and a text."""
    made = tmp_path_factory.mktemp("torchtitan")
    (made / "config.toml").write_text(CONFIG)
    for name in ("tokenizer", "corpus"):
        (made / name).mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    texts = [topics[name] for name in sorted(topics)]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(made / "tokenizer" / "tokenizer.json"))
    marks = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (made / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(marks))
    (made / "corpus" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return made


def train(clusters, folder, way, *flags):
    """(losses as the last stage prints them, to five decimals; what holmes said)"""
    old = any(INSTALLED.glob("torchtitan-0.2.*"))
    options = f"--job.config_file config.toml {way}" if old else FLAGS.format(way)
    path = f"{ROOT}/integration_tests/torchtitan_cpu:{INSTALLED}"
    result = clusters.run("sh", "-c", f"cd {folder}; {LAUNCH} {options} {' '.join(flags)}", timeout=300,
                          env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"})
    assert result.returncode == 0, result.outputs
    text = re.sub(r"\x1b\[[0-9;]*m", "", "".join(result.outputs.values()))
    found = re.findall(r"step: *(\d+) +loss: *([0-9.]+)", text)
    return {int(step): loss for step, loss in found}, said(result)


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_stock_s(two_clusters, folder, way):
    stock, _ = train(two_clusters, folder, WAYS[way])
    ours, told = train(two_clusters, folder, WAYS[way], *two_clusters.holmes)
    assert stock == ours and sorted(ours) == [1, 2, 3, 4] and float(ours[4]) < float(ours[1])
    assert any("ranks renumbered" in line for line in told), told
