"""Finds the training script, its launcher and its arguments in the words of a command.

    srun --nodes 4 bash -c "cd /work; torchrun --nnodes 4 pretrain_gpt.py --num-layers 24"

Programs around the launcher (env, numactl, nohup, docker, singularity, ssh, a shell with -c ...) are part of
the launcher. The text of a shell, or of a shell script that can be read here (sbatch job.sh), is split into
words by shell_text.py. Some console commands train without a script of the user, and take the model from a
file: `Command.hidden_model` is the message about that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from holmes_ext.doctor.command.launch_options import allocation_options, allocation_variables
from holmes_ext.doctor.command.shell_text import batch_options, has_variable, simple_commands
from holmes_ext.errors import HolmesError

SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
#: Ends of names of shell scripts and scripts for schedulers.
SCRIPT_ENDS = (".sh", ".bash", ".sbatch", ".slurm", ".sub", ".job", ".pbs", ".lsf")
#: Modules that start the script or module after them.
LAUNCHER_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.elastic.multiprocessing",
    "deepspeed.launcher.runner",
    "deepspeed.launcher.launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "holmes_ext",
    "pdb",
    "cProfile",
    "coverage",
)
#: Programs that run a command on another machine or in a container, where paths may mean other files.
_ELSEWHERE = (
    *(
        "ssh",
        "docker",
        "podman",
        "nerdctl",
        "singularity",
        "apptainer",
        "enroot",
        "shifter",
        "sarus",
    ),
    *("kubectl", "ray", "sbatch", "pdsh", "clush"),
)
#: Assignment before a program: NNODES=2 megatron sft ...
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "mpirun", "mpiexec", "horovodrun", "srun")
#: Programs that reserve nodes for a command or script.
_BATCH_PROGRAMS = ("sbatch", "salloc")
#: Longest shell script that is read, in bytes.
_MAX_SCRIPT_BYTES = 1 << 20
#: Texts inside of texts (bash -c "ssh a 'bash -c ...'") are read to this depth; deeper ones stay as they are.
_MAX_DEPTH = 4
#: Options of a shell before its text; the last option may be "-c", "-lc", "-exc", ...
_SHELL_OPTION = re.compile(r"[-+][A-Za-z]+|--[a-z]+")
#: Options of ssh that have a value in the next word (ssh(1)).
_SSH_OPTIONS_WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"

# Where a program takes its model from: the part of a sentence that follows the program's name, as in
# "megatron sft takes the model from a checkpoint" (see _message_about_model).
_CHECKPOINT = "takes the model from a checkpoint"
_FILE = "takes the model and its settings from a file"
_RECIPE = "takes the model and its settings from a recipe"
#: Console command -> its subcommands that train, and where the model comes from. Without subcommands, the
#: command itself trains.
CONSOLE_COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "megatron": (("sft", "pt", "rlhf"), _CHECKPOINT),  # ms-swift
    "swift": (("sft", "pt", "rlhf"), _CHECKPOINT),
    "trl": (("sft", "dpo", "grpo", "kto", "reward", "rloo"), _CHECKPOINT),
    "llamafactory-cli": (("train",), _FILE),
    "axolotl": (("train", "pretrain"), _FILE),
    "oumi": (("train",), _FILE),
    "xtuner": (("train",), _FILE),
    "fairseq-train": ((), _RECIPE),
    "fairseq-hydra-train": ((), _FILE),
    "tune": (("run",), _RECIPE),  # torchtune
    "nemo": (("llm", "vlm", "run"), _RECIPE),
    "automodel": ((), _RECIPE),  # NeMo
    "litgpt": (("pretrain", "finetune", "finetune_full", "finetune_lora"), _CHECKPOINT),
}
#: Module -> where the model comes from, for modules that train without a script of the user.
CONSOLE_MODULES = {
    "axolotl.cli.train": _FILE,
    "llamafactory.cli": _FILE,
    "llamafactory.launcher": _FILE,
    "torchtitan.train": _FILE,
    "swift.cli.sft": _CHECKPOINT,
    "oumi": _FILE,
}
#: End of a script's path -> where the model comes from, for scripts that belong to a framework.
CONSOLE_SCRIPTS = {
    "deepy.py": _FILE,  # GPT-NeoX
    "swift/cli/sft.py": _CHECKPOINT,
    "swift/cli/pt.py": _CHECKPOINT,
    "swift/cli/rlhf.py": _CHECKPOINT,
}


#: Argument that gives a value to a key of a configuration (Hydra), such as trainer.num_nodes=4.
_CONFIGURED = re.compile(r"[+~]*[A-Za-z_]\w*(\.\w+)+=.*", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A training command, split at its script."""

    launcher: tuple[str, ...]  # words before the script, e.g. torchrun and its options
    #: "" if the command starts a module or a console command; its name is then the last word of `launcher`.
    script: str
    arguments: tuple[str, ...]  # of the script, module or console command
    #: Message with the way out if the program takes its model from a checkpoint, a file or a recipe, which
    #: holmes does not read; "" if its arguments describe the model.
    hidden_model: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """All words of the command.

        In place of a text for a shell (bash -c TEXT), they have the words of its training command.
        """
        script = (self.script,) if self.script else ()
        return (*self.launcher, *script, *self.arguments)

    @property
    def program(self) -> str:
        """The first program of the command, such as "env" in `NNODES=2 env torchrun train.py`.

        It is the first word before the script that assigns no variable; "" if the command begins
        with the script.
        """
        for word in self.launcher:
            if not _ASSIGNMENT.fullmatch(word):
                return word
        return ""

    @property
    def runs_elsewhere(self) -> bool:
        """True if the script's path cannot be looked up from the current folder of this machine.

        This is so in a container and on another host. It is also assumed for the text of each shell
        (bash -c TEXT), which may begin with `cd`.
        """
        names = {PurePosixPath(word).name for word in self.launcher}
        has_shell = not names.isdisjoint(SHELLS)
        # srun --container-image=...: a container without a program of _ELSEWHERE
        has_image = any(word.startswith("--container-image") for word in self.launcher)
        return has_shell or has_image or not names.isdisjoint(_ELSEWHERE)

    @property
    def unread(self) -> tuple[str, ...]:
        """Arguments with a shell variable, such as "$LR", whose value only a running shell knows.

        If such an argument is the value of a flag, it follows the flag: "--lr $LR".
        """
        found = []
        for before, word in zip(["", *self.arguments], self.arguments):
            if not has_variable(word):
                continue
            is_value = before.startswith("-") and "=" not in before and not word.startswith("-")
            found.append(f"{before} {word}" if is_value else word)
        return tuple(dict.fromkeys(found))

    @property
    def configured(self) -> tuple[str, ...]:
        """Arguments of the script that set a key of its configuration, such as trainer.num_nodes=4.

        Scripts with Hydra take such words in place of flags.
        """
        return tuple(word for word in self.arguments if _CONFIGURED.fullmatch(word))


def split_command(words: Sequence[str]) -> Command:
    """Split a training command at its script, module or console command.

    The first of these in the command counts: a word that ends in .py, a module after -m that is no
    launcher, or a console command that trains (CONSOLE_COMMANDS).

    Only a .py file becomes `script` of the result. The name of a module or console command is the last word
    of `launcher`, and `script` is "":

        torchrun train.py --x           launcher: torchrun             script: train.py   arguments: --x
        torchrun -m my.train --x        launcher: torchrun -m my.train                    arguments: --x
        swift sft --x                   launcher: swift                                   arguments: sft --x

    If the program is one of CONSOLE_COMMANDS, CONSOLE_MODULES or CONSOLE_SCRIPTS, its arguments do not
    describe the model, and `hidden_model` of the result is the message about that.

    Raises:
        HolmesError: The command has no script, module or console command.
    """
    words = _with_shell_text(list(words), os.environ, depth=0)
    for number, word in enumerate(words):
        before = tuple(words[:number])
        after = tuple(words[number + 1 :])
        if word.endswith(".py") and not word.startswith("-"):
            message = _message_about_model(word, _model_source_of_script(word))
            return Command(before, script=word, arguments=after, hidden_model=message)
        if word in ("-m", "--module") and after and _is_module(after[0]):
            module = after[0]
            if module in LAUNCHER_MODULES:
                continue
            message = _message_about_model(f"-m {module}", CONSOLE_MODULES.get(module, ""))
            launcher = (*before, word, module)
            return Command(launcher, script="", arguments=after[1:], hidden_model=message)
        subcommands, model_source = CONSOLE_COMMANDS.get(PurePosixPath(word).name, ((), ""))
        has_subcommand = bool(after) and after[0] in subcommands
        if model_source and (has_subcommand or not subcommands):
            program = f"{word} {after[0]}" if has_subcommand else word
            message = _message_about_model(program, model_source)
            return Command((*before, word), script="", arguments=after, hidden_model=message)
    text = " ".join(words)[:80]
    scripts = [word for word in words if word.endswith(SCRIPT_ENDS)]
    if scripts:
        is_file = Path(scripts[0]).is_file()
        state = (
            "in which no training command was found"
            if is_file
            else "and there is no such file here"
        )
        raise HolmesError(
            f"{text}: {scripts[0]} is a shell script, {state}; "
            "give the command that it starts (bash -x prints it)"
        )
    raise HolmesError(
        f"{text}: no training script (FILE.py, or -m MODULE) in the command; give the whole command"
    )


def _model_source_of_script(path: str) -> str:
    """Return where a script takes its model from, "" for a script that is not in CONSOLE_SCRIPTS.

    The result is the part of a sentence after the script's name. For deepy.py it is "takes the model and its
    settings from a file".
    """
    for end, model_source in CONSOLE_SCRIPTS.items():
        if f"/{path}".endswith(f"/{end}"):
            return model_source
    return ""


def _is_module(word: str) -> bool:
    """Return whether the word after -m can be the name of a Python module, such as my.train.

    Each part between dots is then a Python identifier. Other programs have an option -m, too: the word
    after it is a number in `numactl -m 0`, and no module.
    """
    return all(part.isidentifier() for part in word.split("."))


def _message_about_model(program: str, model_source: str) -> str:
    """Return the message that a program's arguments do not describe its model; "" if they do.

    Args:
        program: The program as in the command, such as "megatron sft".
        model_source: Words that continue the sentence after the program's name, such as "takes the model
            from a checkpoint". "" if the arguments describe the model.
    """
    if not model_source:
        return ""
    return (
        f"{program} {model_source}, which holmes does not read; give --model FILE, --sizes "
        "pipeline=N,tensor=N and --global-batch N before --"
    )


class _ShellText(NamedTuple):
    """Text among the words of a command that a shell would run, such as TEXT of `bash -c TEXT`."""

    text: str
    start: int  # the text is words[start:end] of the command
    end: int
    name: str = ""  # $0
    arguments: tuple[str, ...] | None = None  # $1, $2, ...; None if they are not known
    is_script: bool = False  # whether the text is that of a file


def _with_shell_text(words: list[str], environ: Mapping[str, str], depth: int) -> list[str]:
    """Return a command in which the first text for a shell is replaced by the words of its training command.

    For example `srun bash -c "cd /work; torchrun train.py"` becomes `srun bash -c torchrun train.py`. A
    command of a single quoted word ("torchrun train.py") is such a text as a whole. Words without a text for
    a shell are returned as they are. A shell script that can be read here is such a text, too. The options of
    its #SBATCH lines are put after the word sbatch: `sbatch job.sh` becomes `sbatch --nodes=4 torchrun
    train.py`.

    Args:
        words: The words of the command.
        environ: Environment variables, for variables in the text.
        depth: Number of texts around these words; nothing is replaced at depth _MAX_DEPTH.
    """
    if depth == _MAX_DEPTH:
        return words
    if len(words) == 1 and " " in words[0].strip():  # the whole command between quotes
        return _training_command(words[0], environ, depth)
    for index in range(len(words)):
        if words[index].endswith(".py"):
            return words  # later words are arguments of the training script
        shell_text = _shell_text_at(words, index)
        if shell_text is None:
            continue
        before = _with_batch_options(words[: shell_text.start], shell_text)
        after = words[shell_text.end :]
        variables = {**environ, **allocation_variables(before)}
        if shell_text.name:
            variables["0"] = shell_text.name
        inner = _training_command(shell_text.text, variables, depth, shell_text.arguments)
        if shell_text.is_script and not _may_train(inner):
            continue  # a script that sets up an environment, for example
        return [*before, *inner, *after]
    return words


def _with_batch_options(words: list[str], shell_text: _ShellText) -> list[str]:
    """Return the words before a script for Slurm, with the options of its #SBATCH lines.

    The options are put after the word sbatch. A script alone counts as started by sbatch if it has such
    lines: `holmes plan -- job.sbatch`.

    Args:
        words: The words of the command before the script.
        shell_text: The text of the script.
    """
    options = allocation_options(batch_options(shell_text.text)) if shell_text.is_script else []
    programs = [index for index, word in enumerate(words) if PurePosixPath(word).name == "sbatch"]
    if not words and options:
        return ["sbatch", *options]
    if not programs:
        return words
    start = programs[0] + 1
    return [*words[:start], *options, *words[start:]]


def _shell_text_at(words: list[str], index: int) -> _ShellText | None:
    """Return the text for a shell that a word of a command introduces, or None if it introduces none.

    The texts are TEXT of `bash -c TEXT` (and other shells), `sbatch --wrap TEXT` and `eval TEXT`, the
    words after the host in `ssh HOST WORD ...`, and the content of a shell script that can be read here.

    Args:
        words: All words of the command.
        index: Index of the word, such as that of "bash".
    """
    word = words[index]
    name = PurePosixPath(word).name
    length = len(words)
    script = _script_at(words, index)
    if script is not None:
        return script
    if name in SHELLS:
        start = _index_of_shell_text(words, index)
        if start is None:
            return None
        # The words after the text are its $0, $1, ...
        return _ShellText(
            words[start],
            start,
            end=length,
            name="".join(words[start + 1 : start + 2]),
            arguments=tuple(words[start + 2 :]),
        )
    if word in ("--wrap", "eval") and index + 1 < length:
        text = words[index + 1]
        # simple_commands() turns `sbatch <<EOF` with the lines of a script into `sbatch --wrap SCRIPT`.
        is_script = text.startswith("#!")
        return _ShellText(text, start=index + 1, end=index + 2, is_script=is_script)
    if word.startswith("--wrap="):
        return _ShellText(word.partition("=")[2], start=index, end=length)
    if name == "ssh" and index == 0:  # a later ssh may be the value of an option: pdsh -R ssh
        start = _index_of_remote_command(words)
        if start is None:
            return None
        return _ShellText(" ".join(words[start:]), start, end=length)
    return None


def _script_at(words: Sequence[str], index: int) -> _ShellText | None:
    """Return the content of the shell script that a word of a command names, or None.

    It is known by the end of its name, or by its position after a shell or sbatch.

    Args:
        words: All words of the command.
        index: Index of the word, such as that of "job.sh".
    """
    word = words[index]
    previous = PurePosixPath(words[index - 1]).name if index else ""
    is_after_program = any(
        PurePosixPath(program).name in _BATCH_PROGRAMS for program in words[:index]
    )
    may_be_script = previous in SHELLS or is_after_program or word.endswith(SCRIPT_ENDS)
    if not may_be_script or word.startswith("-"):
        return None
    path = Path(word)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_SCRIPT_BYTES:
            return None
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError:
        return None
    if not word.endswith(SCRIPT_ENDS) and not text.startswith("#!"):
        return None  # a program, or a file of another kind
    return _ShellText(
        text, start=index, end=len(words), arguments=tuple(words[index + 1 :]), is_script=True
    )


def _index_of_shell_text(words: Sequence[str], shell: int) -> int | None:
    """Return the index of TEXT in `bash -c TEXT`; None if the shell has no option -c.

    The option may be a letter among others in a word, as in `bash -lc TEXT`.

    Args:
        words: All words of a command.
        shell: Index of the word that names the shell.
    """
    has_text = False
    index = shell + 1
    while index < len(words) and _SHELL_OPTION.fullmatch(words[index]):
        option = words[index]
        has_text = has_text or ("c" in option and not option.startswith("--"))
        # The options -o and -O (also at the end, as in -euo) have a value in the next word.
        has_value = option == "--rcfile" or option[-1] in "oO" and not option.startswith("--")
        index += 2 if has_value else 1
    return index if has_text and index < len(words) else None


def _index_of_remote_command(words: Sequence[str]) -> int | None:
    """Return the index of the first word of COMMAND in `ssh OPTIONS HOST COMMAND ...`.

    None if the words end with the host.
    """
    index = 1
    while index < len(words) and words[index].startswith("-"):
        option = words[index].removeprefix("-")
        # -p 22 has the value in the next word, -p22 has not.
        index += 2 if option in tuple(_SSH_OPTIONS_WITH_VALUE) else 1
    index += 1  # the host
    return index if index < len(words) else None


def _training_command(
    text: str,
    environ: Mapping[str, str],
    depth: int,
    arguments: tuple[str, ...] | None = None,
) -> list[str]:
    """Return the words of the training command in a text for a shell; [] if the text has no command.

    The text may have several commands, as in "cd /work; python prepare.py; torchrun train.py". The command
    is chosen by these rules, in this order:

    1. A command with a script, module or console command (CONSOLE_COMMANDS) precedes others.
    2. A command with a launcher, such as torchrun, precedes others.
    3. The last command counts.

    Args:
        text: The text.
        environ: Environment variables, for variables in the text.
        depth: Number of other texts around this text (see _with_shell_text).
        arguments: Arguments of a script: $1, $2, ...; None if they are not known.
    """
    candidates = [
        # A command of the text may have a text for a shell itself.
        _with_shell_text(words, environ, depth + 1)
        for words in simple_commands(text, environ, arguments)
    ]
    if not candidates:
        return []

    def priority(item: tuple[int, list[str]]) -> tuple[bool, bool, int]:
        """Return whether rules 1 and 2 prefer a command, and its index in the text for rule 3."""
        index, words = item
        names = [PurePosixPath(word).name for word in words]
        has_launcher = any(name in _LAUNCHERS or name.startswith("torch.dist") for name in names)
        return (_may_train(words), has_launcher, index)

    return max(enumerate(candidates), key=priority)[1]


def _may_train(words: Sequence[str]) -> bool:
    """Return whether a command has a Python script, an option -m, or a name of CONSOLE_COMMANDS."""
    has_script = any(word.endswith(".py") or word == "-m" for word in words)
    return has_script or any(PurePosixPath(word).name in CONSOLE_COMMANDS for word in words)
