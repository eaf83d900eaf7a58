"""Finds the command lines that example scripts of Megatron-LM and Megatron-DeepSpeed pass to their launchers.

    command_lines(checkout, configs) -> [(script, arguments of the training script)]

Nothing is trained. Each shell script runs by bash in a temporary copy of the checkout's scripts, without
rights (as user `nobody` if this process is root). Its PATH has a few harmless programs. In place of each
launcher, it has a program that only records its arguments. ds_config files that a script writes are kept
in `configs`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

LAUNCHERS = (
    *(
        "torchrun",
        "deepspeed",
        "srun",
        "sbatch",
        "python",
        "python3",
        "mpirun",
        "singularity",
        "nsys",
        "uv",
    ),
    *(
        "ds_ssh",
        "ds_report",
        "wget",
        "git",
        "pip",
        "sudo",
        "docker",
        "nvidia-smi",
        "ssh",
        "rm",
        "curl",
        "numactl",
    ),
)
HARMLESS = (
    "cat mkdir dirname basename date hostname seq sed tr cut expr wc head tail grep tee printf uname "
    "nproc sleep"
)
#: Program in place of a launcher. It appends its name, its arguments and its input (a heredoc) to the
#: file $SAID.
STAND_IN = """#!/bin/bash
name=${0##*/}
{ printf '%s\\0' "$name" "$@"; /usr/bin/timeout 1 /bin/cat; printf '\\0\\n\\0'; } >> "$SAID"
if [ $name = sbatch ] && [ -f "${!#}" ]; then exec /bin/bash "${!#}"; fi
[ $name != ssh ]
"""
#: Training scripts of a GPT, Llama or MoE model.
TRAINS = re.compile(r"(^|/)(pretrain_gpt\w*|pretrain_llama\w*|train_gpt\w*|finetune_llama)\.py$")
#: Text of shell scripts that may start such a training script.
MENTIONS = re.compile(
    r"pretrain_gpt|pretrain_llama|train_gpt|finetune_llama|CONFIG\.sh|ds_train|base_script"
)
#: Placeholders that a user must fill in, such as <path>.
TO_FILL_IN = re.compile(r"(?<!<)<([A-Za-z][^<>\n]*)>")
#: Redirection of the output into a log file. Its folder does not exist here.
LOG = re.compile(r"&>>? *[^\s\"]+")
#: Arguments that are tried with each script: none, paths or sizes, and those of examples/gptoss.
ARGUMENTS = ((), tuple("12345678"), ("--checkpoint-path", "tmp"))
LIMIT_S = 5


def command_lines(checkout: Path, configs: Path) -> list[tuple[str, list[str]]]:
    """Return the command lines of all scripts under examples*/ that train a GPT, Llama or MoE model.

    Args:
        checkout: The source of Megatron-LM or Megatron-DeepSpeed.
        configs: Folder for copies of the ds_config files.

    Returns:
        Pairs (path of the script, arguments of the training script).
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        left_out = shutil.ignore_patterns(".git", "*.bin", "*.json.gz", "tests", "images", "docs")
        shutil.copytree(checkout, copy, ignore=left_out, ignore_dangling_symlinks=True)
        tools = Path(folder) / "bin"
        tools.mkdir()
        for name in LAUNCHERS:
            (tools / name).write_text(STAND_IN)
            (tools / name).chmod(0o755)
        for name in HARMLESS.split():
            if program := shutil.which(name):
                (tools / name).symlink_to(program)
        (copy / "tmp").mkdir()  # a folder that some scripts expect
        for script in copy.glob("examples*/**/*.sh"):
            text = script.read_text(errors="replace")
            script.write_text(LOG.sub("", TO_FILL_IN.sub("FILLED_IN", text)))
        # Scripts run as the user "nobody": that user must be able to write.
        for path in (Path(folder), *Path(folder).rglob("*")):
            if not path.is_symlink():
                path.chmod(0o777)
        commands: list[tuple[str, list[str]]] = []
        for script in sorted(copy.glob("examples*/**/*.sh")):
            text = script.read_text(errors="replace")
            if not MENTIONS.search(text):
                continue
            # The script is started in each of these folders, with each of the arguments, until it
            # launches a training.
            folders = (script.parent, copy) if "TEMPLATE" in text else (copy, script.parent)
            for words, start in itertools.product(ARGUMENTS, folders):
                launched = _launched_trainings(script, start, tools, words)
                if launched:
                    break
            name = str(script.relative_to(copy))
            for argv in launched:
                commands.append((name, _with_kept_config(argv, folders, configs)))
        return commands


def _with_kept_config(argv: list[str], folders: tuple[Path, ...], configs: Path) -> list[str]:
    """Copy the ds_config file of a command line to `configs`, and return the command line with the copy.

    Args:
        argv: The command line. Without a ds_config file that exists, its words stay as they are.
        folders: Folders in which the file can be: the script wrote it, or it is beside the script.
        configs: Folder for the copy.
    """
    flag = "--deepspeed_config"
    words: list[str] = []
    for word in argv:
        if word.startswith(f"{flag}="):
            words += word.split("=", 1)
        else:
            words.append(word)
    if flag not in words[:-1]:  # without a word after it, the flag has no value
        return words
    position_of_file = words.index(flag) + 1
    for folder in folders:
        source = folder / words[position_of_file]
        if source.is_file():
            number = len(list(configs.iterdir()))  # makes the name unique
            kept = configs / f"{number}_{source.name}"
            kept.write_bytes(source.read_bytes())
            words[position_of_file] = str(kept)
            break
    return words


def _launched_trainings(
    script: Path, start: Path, tools: Path, arguments: tuple[str, ...]
) -> list[list[str]]:
    """Run a shell script, and return the arguments of all training scripts that it passes to launchers.

    The launchers are programs that only record their command lines (STAND_IN). Nothing is trained.

    Args:
        script: The shell script.
        start: Working directory of the script.
        tools: Folder with the only programs that the script can run.
        arguments: Arguments of the script.
    """
    record = tools.parent / "said"
    record.write_bytes(b"")
    record.chmod(0o666)
    environ = {
        "PATH": str(tools),
        "SAID": str(record),
        "HOME": str(tools.parent),
        "HOSTNAME": "node0",
    }
    # As root, the script runs as the user "nobody" (65534), because it comes from elsewhere.
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            ["/bin/bash", str(script), *arguments],
            cwd=start,
            env=environ,
            timeout=LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **nobody,
        )
    # STAND_IN ends each word with \0, and each call with \0\n\0.
    calls = record.read_text(errors="replace").split("\0\n\0")
    lines = [argv for call in calls for argv in _trainings(call.split("\0"))]
    return [list(argv) for argv in dict.fromkeys(map(tuple, lines))]  # each once, in their order


def _trainings(call: list[str]) -> Iterator[list[str]]:
    """Yield the arguments of the training script in a call of a launcher: once, or not at all.

    There are two forms of such a call:

        torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24         the script is a word
        srun bash -c "cd /work; python pretrain_gpt.py --num-layers 24"     it is inside of a word

    Both yield ["--num-layers", "24"]. Only the first script counts: a launcher starts a single program.
    A script without arguments yields nothing.

    Args:
        call: Words of the launcher's command line, and then its input (a here-document).
    """
    for number, word in enumerate(call):
        # The first form: the word itself is the path of a training script (TRAINS). Its arguments
        # are the words after it. Words without text are dropped, such as an empty input at the end.
        if TRAINS.search(word.strip()):
            if any(call[number + 1 :]):
                yield [text for text in call[number + 1 :] if text.strip()]
            return
        # The second form: the word is a shell command that contains the path of a training script.
        if _names_training_script(word):
            arguments = _arguments_in_text(word)
            if arguments:
                yield arguments
            return


def _names_training_script(text: str) -> bool:
    """Return whether one of the words of a text is the path of a training script."""
    return any(TRAINS.search(word) for word in text.split())


def _arguments_in_text(text: str) -> list[str]:
    """Return the arguments of the first training script in the lines of a shell command."""
    lines = text.replace("\\\n", " ").splitlines()  # joined where a backslash continues a line
    line = next(line for line in lines if _names_training_script(line))
    try:
        words = shlex.split(line.strip().strip('"'))
    except ValueError:  # a quotation that ends on another line
        words = line.split()
    start = next(index for index, word in enumerate(words) if TRAINS.search(word))
    return words[start + 1 :]
