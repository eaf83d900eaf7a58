"""Finds the training script, its launcher and its arguments in the words of a command.

    srun --nodes 4 bash -c "cd /work; torchrun --nnodes 4 pretrain_gpt.py --num-layers 24"

Programs around the launcher (env, numactl, nohup, docker, singularity, ssh, a shell with -c ...) are part of
the launcher. The text of a shell is split into words by shell_text.py. Some console commands train without
a script of the user, and take the model from a file: `Command.hidden_model` is the message about that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from holmes_ext.doctor.shell_text import has_variable, simple_commands
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
#: Shells may start shells; deeper texts stay as they are.
_MAX_DEPTH = 4
#: Options of a shell before its text; the last one may be "-c", "-lc", "-exc", ...
_SHELL_OPTION = re.compile(r"[-+][A-Za-z]+|--[a-z]+")
#: Options of ssh that have a value in the next word (ssh(1)).
_SSH_OPTIONS_WITH_VALUE = "BbcDEeFIiJLlmOopQRSWw"

_CHECKPOINT = "takes the model from a checkpoint"
_FILE = "takes the model and its settings from a file"
_RECIPE = "takes the model and its settings from a recipe"
#: Console command -> its subcommands that train, and where the model comes from.
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
#: End of a script's path -> where the model comes from.
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
    script: str  # "" if the command starts a module or a console command
    arguments: tuple[str, ...]  # of the script or module
    #: Message with the way out if the program takes its model from a checkpoint, a file or a recipe, which
    #: holmes does not read; "" if its arguments describe the model.
    hidden_model: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """All words of the command, with those of a shell's text."""
        script = (self.script,) if self.script else ()
        return (*self.launcher, *script, *self.arguments)

    @property
    def program(self) -> str:
        """The program that the command starts, "" if it has only a script."""
        programs = [word for word in self.launcher if not _ASSIGNMENT.fullmatch(word)]
        return programs[0] if programs else ""

    @property
    def runs_elsewhere(self) -> bool:
        """Whether the script's path may mean another file than here.

        This is so in a container, on another host, and after `cd` in the text of a shell.
        """
        names = {PurePosixPath(word).name for word in self.launcher}
        has_shell = not names.isdisjoint(SHELLS)
        has_image = any(word.startswith("--container-image") for word in self.launcher)
        return has_shell or has_image or not names.isdisjoint(_ELSEWHERE)

    @property
    def unread(self) -> tuple[str, ...]:
        """Arguments with variables that only a running shell replaces, each with the flag before it."""
        found = []
        for before, word in zip(["", *self.arguments], self.arguments):
            if not has_variable(word):
                continue
            is_value = before.startswith("-") and "=" not in before and not word.startswith("-")
            found.append(f"{before} {word}" if is_value else word)
        return tuple(dict.fromkeys(found))

    @property
    def configured(self) -> tuple[str, ...]:
        """Arguments that are no flags but values for keys of a configuration file (KEY.KEY=VALUE)."""
        return tuple(word for word in self.arguments if _CONFIGURED.fullmatch(word))


def split_command(words: Sequence[str]) -> Command:
    """Split a training command at its script, module or console command.

    The first of these in the command counts: a word that ends in .py, a module after -m that is no
    launcher, or a console command that trains (CONSOLE_COMMANDS). The name of a module or console command
    stays among the launcher's words.

    Raises:
        HolmesError: The command has none of them.
    """
    words = _with_shell_text(list(words), os.environ, depth=0)
    for number, word in enumerate(words):
        before = tuple(words[:number])
        after = tuple(words[number + 1 :])
        if word.endswith(".py") and not word.startswith("-"):
            message = _message_about_model(word, _origin_of_script(word))
            return Command(before, script=word, arguments=after, hidden_model=message)
        if word in ("-m", "--module") and after and _is_module(after[0]):
            module = after[0]
            if module in LAUNCHER_MODULES:
                continue
            message = _message_about_model(f"-m {module}", CONSOLE_MODULES.get(module, ""))
            launcher = (*before, word, module)
            return Command(launcher, script="", arguments=after[1:], hidden_model=message)
        subcommands, origin = CONSOLE_COMMANDS.get(PurePosixPath(word).name, ((), ""))
        has_subcommand = bool(after) and after[0] in subcommands
        if origin and (has_subcommand or not subcommands):
            program = f"{word} {after[0]}" if has_subcommand else word
            message = _message_about_model(program, origin)
            return Command((*before, word), script="", arguments=after, hidden_model=message)
    text = " ".join(words)[:80]
    scripts = [word for word in words if word.endswith(SCRIPT_ENDS)]
    if scripts:
        raise HolmesError(
            f"{text}: {scripts[0]} is a shell script, which holmes does not run; "
            "give the command that it starts (bash -x prints it)"
        )
    raise HolmesError(
        f"{text}: no training script (FILE.py, or -m MODULE) in the command; give the whole command"
    )


def _origin_of_script(path: str) -> str:
    """Return where the model of a script in CONSOLE_SCRIPTS comes from; "" for other scripts."""
    for end, origin in CONSOLE_SCRIPTS.items():
        if f"/{path}".endswith(f"/{end}"):
            return origin
    return ""


def _is_module(word: str) -> bool:
    """Return whether a word can be a module's name, which other values of -m (--multi ...) are not."""
    return all(part.isidentifier() for part in word.split("."))


def _message_about_model(program: str, origin: str) -> str:
    """Return the message about a program whose model is elsewhere, "" for an empty origin.

    Args:
        program: The program as in the command, such as "megatron sft".
        origin: Where it takes the model from: an entry of CONSOLE_COMMANDS or the like, or "".
    """
    if not origin:
        return ""
    return (
        f"{program} {origin}, which holmes does not read; give --model FILE, --sizes "
        "pipeline=N,tensor=N and --global-batch N before --"
    )


def _with_shell_text(words: list[str], environ: Mapping[str, str], depth: int) -> list[str]:
    """Return the words of a command with those of a shell's text (bash -c TEXT) in place of the text.

    The text of `ssh HOST COMMAND`, `sbatch --wrap TEXT` and `eval TEXT` is one, too, and so is a command
    that is a single word. If the text has several commands, only the one that trains counts.
    """
    if depth == _MAX_DEPTH:
        return words
    if len(words) == 1 and " " in words[0].strip():  # the whole command between quotes
        return _training_command(words[0], environ, depth)
    for number, word in enumerate(words):
        name = PurePosixPath(word).name
        text_number = 0
        end = len(words)
        if name in SHELLS:
            text_number = _number_of_shell_text(words, number)
            text = words[text_number] if text_number else ""
        elif word in ("--wrap", "eval") and number + 1 < len(words):
            text_number = number + 1
            text = words[text_number]
            end = text_number + 1
        elif word.startswith("--wrap="):
            return [
                *words[:number],
                *_training_command(word.partition("=")[2], environ, depth),
            ]
        elif name == "ssh" and number == 0:
            text_number = _number_of_remote_command(words)
            text = " ".join(words[text_number:]) if text_number else ""
        if text_number:
            return [*words[:text_number], *_training_command(text, environ, depth), *words[end:]]
    return words


def _number_of_shell_text(words: Sequence[str], shell: int) -> int:
    """Return the number of the word with the text of a shell, after -c or the like; 0 if there is none.

    Args:
        words: All words of a command.
        shell: Number of the word that names the shell.
    """
    has_text = False
    number = shell + 1
    while number < len(words) and _SHELL_OPTION.fullmatch(words[number]):
        option = words[number]
        has_text = has_text or ("c" in option and not option.startswith("--"))
        # The options -o and -O (also at the end, as in -euo) have a value in the next word.
        has_value = option == "--rcfile" or option[-1] in "oO" and not option.startswith("--")
        number += 2 if has_value else 1
    return number if has_text and number < len(words) else 0


def _number_of_remote_command(words: Sequence[str]) -> int:
    """Return the number of the first word that ssh runs on the other host; 0 if there is none."""
    number = 1
    while number < len(words) and words[number].startswith("-"):
        option = words[number].removeprefix(
            "-"
        )  # -p 22 has the value in the next word, -p22 has not
        number += 2 if option in tuple(_SSH_OPTIONS_WITH_VALUE) else 1
    number += 1  # the host
    return number if number < len(words) else 0


def _training_command(text: str, environ: Mapping[str, str], depth: int) -> list[str]:
    """Return the words of the command in a shell's text that trains; [] if the text has no command.

    The last command with a launcher and a script counts, otherwise the last one with a script, and
    otherwise the last one.
    """
    candidates = [
        _with_shell_text(words, environ, depth + 1) for words in simple_commands(text, environ)
    ]
    if not candidates:
        return []

    def rank(item: tuple[int, list[str]]) -> tuple[bool, bool, int]:
        number, words = item
        names = [PurePosixPath(word).name for word in words]
        has_script = any(word.endswith(".py") or word == "-m" for word in words)
        has_console = any(name in CONSOLE_COMMANDS for name in names)
        has_launcher = any(name in _LAUNCHERS or name.startswith("torch.dist") for name in names)
        return (has_script or has_console, has_launcher, number)

    return max(enumerate(candidates), key=rank)[1]
