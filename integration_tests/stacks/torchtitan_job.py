"""Files and flags of a small torchtitan job for tests: configuration, byte-level tokenizer and training text.

WAYS has the flags for different ways to divide the job over ranks, such as HSDP.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from pydoc_data.topics import topics

import tokenizers

from integration_tests.jobs import ROOT

#: The folder with torchtitan and what it needs besides .venv, as `make torchtitan` fills it.
INSTALLED = Path(os.environ.get("HOLMES_TEST_TORCHTITAN") or ROOT / "build" / "torchtitan")

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
HSDP = "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2"
PIPELINE = ("--parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 2"
            " --parallelism.pipeline_parallel_schedule {}")
WAYS = {"HSDP": HSDP, "1F1B": PIPELINE.format("1F1B"), "breadth first": PIPELINE.format("LoopedBFS")}


def write_job(made: Path) -> Path:
    """Writes it into this folder."""
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
