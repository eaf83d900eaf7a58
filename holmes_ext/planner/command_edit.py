"""Changes that make a training command run another plan: flags to remove, to change and to add.

    command     pretrain_gpt.py --tensor-model-parallel-size 4 --recompute-activations --bf16
    wanted      --tensor-model-parallel-size 1 --holmes

    remove      --recompute-activations
    change      --tensor-model-parallel-size 4 -> 1
    add         --holmes

All other words stay where they are, launcher and script included.
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holmes_ext.planner.plan_flags import ANY_WORDS


class ChangedFlag(NamedTuple):
    """Flag, or key of ds_config, whose value changes."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name} {self.before} -> {self.after}"


@dataclass(frozen=True)
class Edit:
    """Flags of a command, or keys of a ds_config, to remove, to change and to add."""

    #: A text for each flag with its value, such as "--recompute-granularity full", or for each key.
    remove: tuple[str, ...] = ()
    change: tuple[ChangedFlag, ...] = ()
    #: A text for each flag with its value, or for each key with its value ("train_batch_size 64").
    add: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Describe the edit in at most three lines: flags to remove, flags to change and flags to add.

        Example: ["remove --use-torch-fsdp2", "add --recompute-granularity full"].
        """
        texts = {
            "remove": " ".join(self.remove),
            "change": ", ".join(map(str, self.change)),
            "add": " ".join(self.add),
        }
        return [f"{verb} {text}" for verb, text in texts.items() if text]


@dataclass(frozen=True)
class CommandEdit:
    """Changes to a training command and its ds_config, and both as they are afterwards."""

    flags: Edit
    command: tuple[str, ...]  # all words of the new command
    config_file: str = ""  # ds_config that the command names; "" if it names none
    config_keys: Edit = Edit()
    config: dict[str, Any] = field(default_factory=dict)  # whole new content of the ds_config

    def lines(self) -> list[str]:
        """Describe the changes to a training command and its ds_config, as lines to print."""
        lines = self.flags.lines()
        for line in self.config_keys.lines():
            lines.append(f"{self.config_file}: {line}")
        return lines or ["nothing to change"]

    def whole_lines(self) -> list[str]:
        """Return the complete new training command as lines to print, and the new ds_config if it changes."""
        lines = [shlex.join(self.command)]
        if self.config_keys.lines():
            lines.append(f"{self.config_file}: {json.dumps(self.config)}")
        return lines


class _Flag(NamedTuple):
    """A flag in a command, with the words that belong to it."""

    name: str  # "" for words that belong to no flag of the table
    words: tuple[str, ...]  # as they stand in the command: ("--a=1",) or ("--a", "1")

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values of this command-line flag: the words after it, or the text after its "="."""
        _, equals, value = self.words[0].partition("=")
        return (value,) if equals else self.words[1:]

    def with_values(self, values: Sequence[str]) -> _Flag:
        """Return a copy of this command-line flag with other values.

        A flag that was written as --flag=value keeps this form.
        """
        if "=" in self.words[0] and len(values) == 1:
            return self._replace(words=(f"{self.name}={values[0]}",))
        return self._replace(words=(self.name, *values))


def by_flag(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group the words of a command line by flag: return flag -> the words that follow it.

    Example: --tensor-model-parallel-size 4 --bf16 -> {"--tensor-model-parallel-size": ("4",),
    "--bf16": ()}

    Args:
        words: Flags with their values; the first word is a flag.
    """
    values: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word
            values[flag] = ()
        else:
            values[flag] += (word,)
    return values


def flags_of(words: Sequence[str], words_after: Mapping[str, int]) -> Iterator[_Flag]:
    """Yield the parts of a command: each flag in `words_after` with its values, all other words singly.

    A value ends at the next word that begins with "--", even if the flag should have more words.
    All parts together have the words of the command, in the same order.

    Args:
        words: The command.
        words_after: Flag -> number of words that follow it, or ANY_WORDS.
    """
    position = 0
    while position < len(words):
        name, equals, _ = words[position].partition("=")
        if name not in words_after:
            yield _Flag(name="", words=(words[position],))
            position += 1
            continue
        end = position + 1
        if not equals:
            count = words_after[name]
            while end < len(words) and not words[end].startswith("--"):
                if count != ANY_WORDS and end - position > count:
                    break
                end += 1
        yield _Flag(name, words=tuple(words[position:end]))
        position = end


def edited(
    words: Sequence[str],
    wanted: Mapping[str, tuple[str, ...]],
    words_after: Mapping[str, int],
    unwanted: Collection[str],
) -> tuple[Edit, tuple[str, ...]]:
    """Edit the flags of a training command: return the changes, and the new command.

    If a flag stands several times in the command, the last occurrence counts, as in argparse. So that
    is changed, and earlier occurrences are removed.

    Args:
        words: The command.
        wanted: Flag -> its values in the new command.
        words_after: Flag -> number of words that follow it, or ANY_WORDS.
        unwanted: Flags that the new command must not have.
    """
    counts = {**words_after, **{flag: len(values) for flag, values in wanted.items()}}
    parts = list(flags_of(words, counts))
    present = {part.name for part in parts}
    kept: list[_Flag] = []
    remove: list[str] = []
    change: list[ChangedFlag] = []
    seen: set[str] = set()
    for part in reversed(parts):
        name = part.name
        if name in wanted and name not in seen:
            seen.add(name)
            if part.values != wanted[name]:
                before = shlex.join(part.values)
                change.append(ChangedFlag(name, before, after=shlex.join(wanted[name])))
                part = part.with_values(wanted[name])
            kept.append(part)
        elif name in wanted or name in unwanted:
            remove.append(shlex.join(part.words))
        else:
            kept.append(part)
    new_words = [word for part in reversed(kept) for word in part.words]
    add = []
    for flag, values in wanted.items():
        if flag not in present:
            add.append(shlex.join((flag, *values)))
            new_words += [flag, *values]
    edit = Edit(tuple(reversed(remove)), tuple(reversed(change)), tuple(add))
    return edit, tuple(new_words)


def edited_config(
    config: Mapping[str, Any], wanted: Mapping[str, Any], unwanted: Collection[str]
) -> tuple[Edit, dict[str, Any]]:
    """Edit DeepSpeed's configuration: return the changes to its keys, and the new content.

    Keys of nested tables are joined by dots: "zero_optimization.stage". All other keys stay.

    Args:
        config: Content of the file.
        wanted: Key -> value in the new file.
        unwanted: Keys, of values or whole tables, that the new file must not have.
    """
    new_config = copy.deepcopy(dict(config))
    remove = []
    change = []
    add = []
    for key in unwanted:
        *tables, name = key.split(".")
        table = _table(new_config, tables)
        if name in table:
            remove.append(key)
            del table[name]
    for key, value in wanted.items():
        *tables, name = key.split(".")
        table = new_config
        for table_name in tables:
            if not isinstance(table.get(table_name), dict):
                table[table_name] = {}
            table = table[table_name]
        if name not in table:
            add.append(f"{key} {json.dumps(value)}")
        elif table[name] != value:
            before = json.dumps(table[name])
            change.append(ChangedFlag(key, before, after=json.dumps(value)))
        table[name] = value
    return Edit(tuple(remove), tuple(change), tuple(add)), new_config


def _table(config: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a nested table of a ds_config; if there is none, an empty dictionary outside of it."""
    table: dict[str, Any] = config
    for name in names:
        nested = table.get(name)
        if not isinstance(nested, dict):
            return {}
        table = nested
    return table
