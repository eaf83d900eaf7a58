"""Files and flags of a small torchtitan job for tests: configuration, byte-level tokenizer and training text.

WAYS has the flags for different ways to divide the job over ranks, such as HSDP. torchtitan 0.2 reads a
configuration file; from 0.3 on a configuration is a Python function, which flags change.
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
PIPELINE = (
    "--parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 2"
    " --parallelism.pipeline_parallel_schedule {}"
)
WAYS = {
    "HSDP": HSDP,
    "1F1B": PIPELINE.format("1F1B"),
    "breadth first": PIPELINE.format("LoopedBFS"),
}
#: Configuration of the small job for torchtitan 0.3 and newer. A data set "text" would be a loader of
#: `datasets` that reads all files of the folder, also the caches of the ranks; so it is "c4_test".
FLAGS_FROM_0_3 = (
    "--module llama3 --config llama3_debugmodel --hf-assets-path tokenizer --dump-folder out"
    " --dataloader.dataset c4_test --dataloader.dataset-path corpus --training.local-batch-size 2"
    " --training.seq-len 32 --training.steps 4 --training.mixed-precision-param float32"
    " --metrics.log-freq 1 --training.disable-cuda-graphs --debug.seed 1 --compile.no-enable"
).split()


def reads_configuration_file() -> bool:
    """Return whether the installed torchtitan has the command line of 0.2, with --job.config_file."""
    return any(INSTALLED.glob("torchtitan-0.2.*"))


def job_arguments(*flags: str) -> list[str]:
    """Return the arguments of torchtitan.train for the small job, and these flags."""
    if reads_configuration_file():
        return ["--job.config_file", "config.toml", *flags]
    return [*FLAGS_FROM_0_3, *flags]


def write_job(made: Path) -> Path:
    """Write the files of the job into a folder, and return the folder."""
    (made / "config.toml").write_text(CONFIG)  # read by torchtitan 0.2
    for name in ("tokenizer", "corpus"):
        (made / name).mkdir()

    # A byte-level BPE tokenizer, trained on the texts of Python's help topics.
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    texts = [topics[name] for name in sorted(topics)]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(made / "tokenizer" / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (made / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))

    # The training texts, one JSON object a line.
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (made / "corpus" / "data.json").write_text("".join(lines))
    return made
