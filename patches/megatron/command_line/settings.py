"""A command line, and the ds_config that it names, as settings by name; what is not read, what is unknown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.megatron.command_line.flags import (
    DS_CONFIG,
    NO_BEARING,
    NO_BEARING_KEYS,
    NOT_READ,
    READ,
    UNLESS,
)


@dataclass(frozen=True)
class Settings:
    """values: by the names of flags.py. flags: each with what follows. not_read: name -> why. overruled: what
    ds_config and flags say differently (ds_config's counts)."""

    values: dict[str, Any]
    flags: dict[str, list[str]]
    not_read: dict[str, str]
    unknown: tuple[str, ...] = ()
    overruled: tuple[str, ...] = ()


def words(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return each flag of a command line, and the words that follow it.

    If a flag is given twice, the last one counts, as in argparse.
    """
    by_flag: dict[str, list[str]] = {}
    last: list[str] = []  # the words of the latest flag
    for item in argv:
        name, equals, value = item.partition("=")
        if name.startswith("--") and len(name) > 2 and " " not in name:
            last = by_flag[name] = [value] if equals else []
        else:
            last.append(item)
    return by_flag


def read(argv: Sequence[str]) -> Settings:
    """Return the settings in a command line, and in the ds_config file that it names.

    Values that should be numbers but are none are left out: the script itself refuses them.
    """
    flags = words(argv)
    values = settings_of(READ, flags)
    tensor = str(values.get("tensor", 1))
    # Flags of NOT_READ change the step in a way that holmes does not count. With some values they change
    # nothing, and are left out here.
    spoken = [flag for flag, said in flags.items() if not _harmless(flag, " ".join(said), tensor)]
    not_read = {flag: NOT_READ[flag] for flag in spoken if flag in NOT_READ}
    known = (*READ, *NOT_READ)
    unknown = [flag for flag in flags if flag not in known and not flag.startswith(NO_BEARING)]
    config = ds_config.from_arguments(list(argv))
    if config is None:
        return Settings(values, flags, not_read, tuple(unknown))
    name = Path(config.path).name
    if not config.digest:  # "": the file could not be read
        not_read[name] = "cannot be read as JSON: its settings are not counted"
        return Settings(values, flags, not_read, tuple(unknown))
    # The keys of ds_config are read like flags that are followed by one word.
    keys = {key: [said] for key, said in _leaves(config.content) if said != "auto"}
    in_config = settings_of(DS_CONFIG, keys)
    for key, (said,) in keys.items():
        # NOT_READ has keys, and names of tables of keys.
        entry = next(
            (known for known in NOT_READ if key == known or key.startswith(f"{known}.")), ""
        )
        if entry and not _harmless(entry, str(said)):
            not_read[f"{name}: {entry}"] = NOT_READ[entry]
        elif not entry and key not in DS_CONFIG and not key.startswith(NO_BEARING_KEYS):
            unknown.append(f"{name}: {key}")
    # Settings with different values in ds_config and in the flags. ds_config's zero counts without a message.
    both = [
        key
        for key in in_config
        if key in values and values[key] != in_config[key] and key != "zero"
    ]
    overruled = [
        f"{key.replace('_', ' ')} {in_config[key]} of {name} counts, not {values[key]} of the flags"
        for key in both
    ]
    return Settings(
        values | in_config, flags, not_read, tuple(dict.fromkeys(unknown)), tuple(overruled)
    )


def settings_of(
    table: Mapping[str, tuple[str, Any]], given: Mapping[str, list[Any]]
) -> dict[str, Any]:
    """Return the settings that the given names say, by the table.

    If two given names say the same setting, the later one in the table counts.

    Args:
        table: Flag or key -> (setting, meaning). flags.py describes the meanings.
        given: Flag or key -> the words that follow it.
    """
    settings = {}
    for name, (setting, meaning) in table.items():
        if name in given and (value := _value(meaning, given[name])) is not None:
            settings[setting] = value
    return settings


def _value(meaning: Any, said: Sequence[Any]) -> Any:
    """Return the value of a setting, or None if the words are nothing that the flag can mean.

    Args:
        meaning: A type that converts the words, a dictionary that translates the first word, or the value
            itself, which the flag alone means.
        said: The words that follow the flag.
    """
    first = said[0] if said else ""
    if meaning is int:
        return int(first) if str(first).isdecimal() and len(str(first)) < 13 else None
    if meaning is list:
        return [int(text) for text in said if text.isdecimal() and len(text) < 13] or None
    if meaning is float:
        return float(first) if str(first).replace(".", "", 1).isdecimal() else None
    if meaning is str:
        return str(first) or None
    # The entry "" of a dictionary is for all words that it does not have.
    return meaning.get(first, meaning.get("")) if isinstance(meaning, dict) else meaning


def _harmless(name: str, said: str, tensor: str = "") -> bool:
    values = UNLESS.get(name, ())
    return said in values or ("tensor" in values and said == tensor)


def _leaves(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """("a.b", value) of tables within tables; nothing of one that is not enabled but that it is not."""
    for key, value in table.items():
        if not isinstance(value, dict):
            yield before + key, value
        elif value.get("enabled", True) is not False:
            yield from _leaves(value, f"{before}{key}.")
