"""A command line, and the ds_config that it names, as settings by name; what is not read, what is unknown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.megatron.command_line.flags import DS_CONFIG, READ
from holmes_ext.patches.megatron.command_line.not_read import NO_BEARING, NO_BEARING_KEYS, NOT_READ, UNLESS


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
    """Each flag with the words that follow it; given twice the last counts, as with argparse."""
    by_flag: dict[str, list[str]] = {}
    last: list[str] = []
    for item in argv:
        name, equals, value = item.partition("=")
        if name.startswith("--") and len(name) > 2 and " " not in name:
            last = by_flag[name] = [value] if equals else []
        else:
            last.append(item)
    return by_flag


def read(argv: Sequence[str]) -> Settings:
    """What `argv` and its ds_config say. Values that are no numbers, the script's to refuse, say nothing."""
    flags = words(argv)
    values = settings_of(READ, flags)
    tensor = str(values.get("tensor", 1))
    spoken = [flag for flag, said in flags.items() if not _harmless(flag, " ".join(said), tensor)]
    not_read = {flag: NOT_READ[flag] for flag in spoken if flag in NOT_READ}
    known = (*READ, *NOT_READ)
    unknown = [flag for flag in flags if flag not in known and not flag.startswith(NO_BEARING)]
    config = ds_config.from_arguments(list(argv))
    if config is None:
        return Settings(values, flags, not_read, tuple(unknown))
    name = Path(config.path).name
    if not config.digest:
        not_read[name] = "cannot be read as JSON: its settings are not counted"
        return Settings(values, flags, not_read, tuple(unknown))
    keys = {key: [said] for key, said in _leaves(config.content) if said != "auto"}
    in_config = settings_of(DS_CONFIG, keys)
    for key, (said,) in keys.items():
        entry = next((known for known in NOT_READ if key == known or key.startswith(f"{known}.")), "")
        if entry and not _harmless(entry, str(said)):
            not_read[f"{name}: {entry}"] = NOT_READ[entry]
        elif not entry and key not in DS_CONFIG and not key.startswith(NO_BEARING_KEYS):
            unknown.append(f"{name}: {key}")
    both = [key for key in in_config if key in values and values[key] != in_config[key] and key != "zero"]
    overruled = [f"{key.replace('_', ' ')} {in_config[key]} of {name} counts, not {values[key]} of the flags"
                 for key in both]
    return Settings(values | in_config, flags, not_read, tuple(dict.fromkeys(unknown)), tuple(overruled))


def settings_of(table: Mapping[str, tuple[str, Any]], given: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Settings of what is `given`; of two names of one setting the later in the table counts."""
    settings = {}
    for name, (setting, meaning) in table.items():
        if name in given and (value := _value(meaning, given[name])) is not None:
            settings[setting] = value
    return settings


def _value(meaning: Any, said: Sequence[Any]) -> Any:
    """None where `said` is nothing that the flag can mean."""
    first = said[0] if said else ""
    if meaning is int:
        return int(first) if str(first).isdecimal() and len(str(first)) < 13 else None
    if meaning is list:
        return [int(text) for text in said if text.isdecimal() and len(text) < 13] or None
    if meaning is float:
        return float(first) if str(first).replace(".", "", 1).isdecimal() else None
    if meaning is str:
        return str(first) or None
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
