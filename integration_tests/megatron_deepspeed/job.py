"""Runs pretrain_gpt.py of a Megatron-DeepSpeed checkout on emulated nodes, and reads its log."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SITE = Path(__file__).resolve().parents[2] / "examples" / "megatron_deepspeed" / "site"
LOSS = re.compile(
    r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?lm loss: ([\d.E+-]+)"
)
SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 32 --max-position-embeddings 32"
).split()
#: Without a GPU there are no fused kernels but DeepSpeed's Adam (Checkout.compile_adam).
ON_CPU = (
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-async-tensor-model-parallel-allreduce --ds_fused_adam"
).split()
#: What is imported once, before a process is forked for each rank: half of a short run's seconds otherwise.
PRELOADED = (
    "torch",
    "deepspeed",
    "deepspeed.sequence.fpdt_layer",
    "transformers.models.auto.tokenization_auto",
)
TRAINING = (
    "--lr 1e-3 --lr-decay-style constant --weight-decay 0 --clip-grad 0 --attention-dropout 0 "
    "--hidden-dropout 0 --seed 1234 --init-method-std 0.05 --split 90,5,5 --data-impl mmap --num-workers 0 "
    "--log-interval 1 --eval-interval 100000 --eval-iters 0"
).split()


@dataclass(frozen=True)
class Log:
    """The losses, step times and messages of holmes that a run of pretrain_gpt.py printed."""

    losses: dict[int, float]  # by training step, from 1
    seconds: dict[int, float]  # by training step, from 1
    lines: list[str]  # of holmes, except for those in `served` and `advice`
    served: list[str]  # "... gets an empty module": holmes replaces a module that is not installed
    #: "a restart with --holmes-partition ...": other layers per stage would be faster
    advice: list[str]


def holmes_lines(result) -> list[str]:
    """Return the lines that holmes printed on any rank and that are the same in every run.

    Left out are the lines about modules that are not installed, which depend on versions, and those that
    advise other layers per pipeline stage, which depend on measured times.

    Args:
        result: The RunResult of a job, with the output of each rank.
    """
    return [
        line for line in _all_holmes_lines(result) if not (_is_served(line) or _is_advice(line))
    ]


def _all_holmes_lines(result) -> list[str]:
    lines = [line for output in result.outputs.values() for line in output.splitlines()]
    return [line for line in lines if line.startswith("holmes:")]


def _is_served(line: str) -> bool:
    return "gets an empty module" in line


def _is_advice(line: str) -> bool:
    return "a restart with --holmes-partition" in line


def byte_vocabulary(source: Path, folder: Path) -> tuple[Path, Path]:
    """Write the files of a vocabulary of bytes for Megatron's GPT2BPETokenizer.

    Returns:
        The file of tokens (GPT-2's 256 byte tokens and the end of a text), and the empty file of merges.
    """
    gpt2_tokens = json.loads((source / "examples_deepspeed/rebase/gpt2-vocab.json").read_text())
    tokens = {token: number for token, number in gpt2_tokens.items() if number < 256}
    vocabulary = folder / "bytes.json"
    merges = folder / "merges.txt"
    vocabulary.write_text(json.dumps({**tokens, "<|endoftext|>": 256}))
    merges.write_text("#version: 0.2\n")
    return vocabulary, merges


class Checkout:
    """Copy of a Megatron-DeepSpeed checkout, with a corpus made by its own tool.

    It is a copy because running the scripts compiles code and writes files in the checkout.
    """

    def __init__(
        self, source: str | Path, folder: Path, vocabulary: tuple[Path, Path] | None = None
    ):
        """Copy the checkout, make a training text for it, and compile its C++ helpers.

        Args:
            source: The checkout of Megatron-DeepSpeed, which stays as it is.
            folder: The copy and all other files are written into it.
            vocabulary: Files with the tokens and the merges; None for those of GPT-2.
        """
        self.folder = folder / "checkout"
        shutil.copytree(
            source, self.folder, ignore=shutil.ignore_patterns(".git", "images", "docs")
        )
        self.env = {
            # The checkout's Makefile calls python3: the one that runs the tests.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            # SITE has a sitecustomize.py, with which Megatron-DeepSpeed trains on CPUs.
            "PYTHONPATH": os.pathsep.join(
                [str(SITE), str(self.folder), os.environ.get("PYTHONPATH", "")]
            ).rstrip(":"),
            "DS_ACCELERATOR": "cpu",  # read by DeepSpeed
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron requires it for --sequence-parallel
            "TORCHDYNAMO_DISABLE": "1",
            # DeepSpeed compiles its extensions into this folder, not into the user's cache. A job that is
            # ended while it compiles leaves a lock file, for which later jobs would wait without end.
            "TORCH_EXTENSIONS_DIR": str(folder / "torch_extensions"),
        }
        rebase = self.folder / "examples_deepspeed" / "rebase"  # has GPT-2's vocabulary
        self.on_cpu = list(ON_CPU)  # flags of pretrain_gpt.py
        tokens, merges = vocabulary or (rebase / "gpt2-vocab.json", rebase / "gpt2-merges.txt")
        self.vocabulary = ["--vocab-file", str(tokens), "--merge-file", str(merges)]
        self.corpus = self._make_corpus(folder)  # the training text, as token numbers
        # Compiles the dataset's C++ helpers.
        self.check(["make"], cwd=self.folder / "megatron" / "data")

    def compile_adam(self) -> None:
        """Compile the C++ extension of DeepSpeed's fused Adam.

        Otherwise the first training job would compile it, and could exceed its time limit.
        """
        load = (
            "from deepspeed.ops.op_builder.cpu import FusedAdamBuilder; FusedAdamBuilder().load()"
        )
        self.check([sys.executable, "-c", load])

    def use_adam_of_torch(self) -> None:
        """Train with torch's Adam, which needs no compiler, instead of DeepSpeed's."""
        self.on_cpu.remove("--ds_fused_adam")

    def check(self, command: list[str], cwd: Path | None = None) -> None:
        """Run a command in the copy, and assert that it succeeds."""
        env = {**os.environ, **self.env, **self.stand_ins(command)}
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _make_corpus(self, folder: Path) -> Path:
        """Make a corpus of English text that every Python has, one document for each help topic."""
        from pydoc_data import topics

        text = folder / "topics.jsonl"
        lines = [json.dumps({"text": topic}) + "\n" for _, topic in sorted(topics.topics.items())]
        text.write_text("".join(lines))
        tool = [
            sys.executable,
            "tools/preprocess_data.py",
            "--input",
            str(text),
            "--output-prefix",
            str(folder / "topics"),
        ]
        self.check(
            [
                *tool,
                *self.vocabulary,
                "--tokenizer-type",
                "GPT2BPETokenizer",
                "--dataset-impl",
                "mmap",
                "--append-eod",
                "--workers",
                "1",
            ]
        )
        return folder / "topics_text_document"

    def config(self, zero: int = 0, dtype: str = "fp32", **more) -> Path:
        """Write a ds_config.json, and return its path; equal configurations share one file."""
        document = {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 1000,
            "zero_optimization": {
                "stage": zero,
                "reduce_bucket_size": 10_000_000,
                **more.pop("zero_optimization", {}),
            },
        }
        if dtype == "bf16":
            document["bf16"] = {"enabled": True}
            if zero:  # without ZeRO, DeepSpeed refuses this key
                document["data_types"] = {"grad_accum_dtype": "fp32"}
        document.update(more)
        text = json.dumps(document, indent=1)
        path = self.folder / f"ds_{abs(hash(text)):x}.json"
        path.write_text(text)
        return path

    def arguments(
        self,
        steps: int,
        *flags: str,
        zero: int = 0,
        dtype: str = "fp32",
        config: Path | None = None,
        shape=SHAPE,
    ) -> list[str]:
        """Return the command line of pretrain_gpt.py; `flags` come last and override earlier flags."""
        return [
            str(self.folder / "pretrain_gpt.py"),
            *shape,
            *TRAINING,
            *self.on_cpu,
            *self.vocabulary,
            "--data-path",
            str(self.corpus),
            "--micro-batch-size",
            "2",
            "--global-batch-size",
            "16",
            "--train-iters",
            str(steps),
            *(["--bf16"] if dtype == "bf16" else []),
            "--deepspeed",
            "--deepspeed_config",
            str(config or self.config(zero, dtype)),
            "--zero-stage",
            str(zero),
            *flags,
        ]

    @staticmethod
    def stand_ins(arguments) -> dict[str, str]:
        """Return the variable that replaces missing modules in jobs without holmes.

        See examples/megatron_deepspeed/site.
        """
        return {} if "--holmes" in arguments else {"STAND_INS": "1"}

    def run(self, clusters, *arguments: str, env=None, **more):
        """Run a command on every node of `clusters` (a LabOf), and return the lab's RunResult."""
        env = {**self.env, **self.stand_ins(arguments), **(env or {})}
        return clusters.run(*arguments, preload=PRELOADED, env=env, cwd=self.folder, **more)


def read_log(result) -> Log:
    """Return the losses, the step times and the messages of holmes in the output of a pretrain_gpt.py run.

    Args:
        result: The RunResult of the job, with the output of each rank.

    Raises:
        AssertionError: The run failed. The message has the end of the failed rank's output.
    """
    output_of_failure = result.outputs[result.first_failed or 0]
    assert result.returncode == 0, f"{result.returncode}: {output_of_failure[-6000:]}"
    lines = [line for output in result.outputs.values() for line in output.splitlines()]
    losses = {}
    seconds = {}
    for line in lines:
        match = LOSS.search(line)  # matches the line that Megatron prints after a training step
        if match:
            step, milliseconds, loss = match.groups()
            losses[int(step)] = float(loss)
            seconds[int(step)] = float(milliseconds) / 1e3
    printed = _all_holmes_lines(result)
    return Log(
        losses=losses,
        seconds=seconds,
        lines=holmes_lines(result),
        served=[line for line in printed if _is_served(line)],
        advice=[line for line in printed if _is_advice(line)],
    )
