"""Reads the settings of a training job from its command line, and from the ds_config file that it names.

A setting has a name and a value, such as "layers" and 24. The tables in flags.py map flags, and keys of
ds_config, to their settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.patches.deepspeed import ds_config
from holmes_ext.patches.deepspeed.ds_config import DsConfig
from holmes_ext.patches.megatron.command_line.flags import (
    FLAG_PREFIXES_WITHOUT_EFFECT,
    KEY_PREFIXES_WITHOUT_EFFECT,
    MODEL_OF_FLAG,
    REASON_NOT_COUNTED,
    REASON_OF_PREFIX,
    SETTING_OF_FLAG,
    SETTING_OF_KEY,
    VALUES_WITHOUT_EFFECT,
    SettingRule,
)

#: Flags that a program with Megatron's options under names with underscores (ms-swift, Megatron-LLM)
#: nearly always gets. With one of them, all underscores count as hyphens.
FLAGS_WITH_UNDERSCORES = (
    "--tensor_model_parallel_size",
    "--pipeline_model_parallel_size",
    "--num_attention_heads",
)
#: Numbers with more digits are ignored: no setting is that large.
MAX_DIGITS = 12


@dataclass(frozen=True)
class Settings:
    """Settings of a training job, e.g. "layers" -> 24, from its command line and ds_config file.

    read_settings() makes this object. The prediction of the step time uses `values`. Flags and keys
    that give no setting are in two more fields. `not_counted` has those with an effect that the
    prediction cannot count. `unknown` has those that holmes does not know.
    """

    values: dict[str, Any]  # name of a setting -> value
    flags: dict[str, list[str]]  # flag -> the words that follow it
    #: Flag or key that changes a step's time or memory, but that the prediction cannot count -> reason.
    not_counted: dict[str, str]
    unknown: tuple[str, ...] = ()  # flags and keys that are in none of the tables
    #: A line for each setting that ds_config and flags give differently.
    overruled: tuple[str, ...] = ()


def words_by_flag(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return each flag of a command line with the words that follow it.

    Example: ["--bf16", "--split", "9", "-1", "--lr=0.1"] gives {"--bf16": [], "--split": ["9", "-1"],
    "--lr": ["0.1"]}. Only words that begin with two hyphens are flags. Others, such as -1 or -x, belong to
    the flag before them.

    If a flag is given twice, the last one counts, as in argparse. Names such as --num_layers become
    --num-layers if the command line has one of FLAGS_WITH_UNDERSCORES.
    """
    has_underscores = any(word.partition("=")[0] in FLAGS_WITH_UNDERSCORES for word in argv)
    words_of: dict[str, list[str]] = {}
    # Words after the latest flag. It is the list in words_of, so a word added here is added there. Words
    # before the first flag go to a list that is dropped.
    following: list[str] = []
    for word in argv:
        flag, equals, value = word.partition("=")
        is_flag = flag.startswith("--") and flag != "--" and " " not in flag
        if is_flag:
            if has_underscores:
                flag = flag.replace("_", "-")
            following = [value] if equals else []
            words_of[flag] = following
        else:
            following.append(word)
    return words_of


def read_settings(argv: Sequence[str]) -> Settings:
    """Return the settings in a command line, and in the ds_config file that it names.

    A setting has a name and a value, such as "layers" -> 24. The prediction of the step time reads
    the settings. The tables of flags.py sort all flags of the frameworks into three kinds:

    - Flags that give a setting, such as --num-layers. A value of the wrong type is left out: the
      script itself refuses it.
    - Flags that change a step's time or memory in a way that the prediction cannot count. They are
      returned in `not_counted`, with the reason.
    - Flags without effect on time and memory. They are ignored.

    A flag in none of these tables is returned in `unknown`. If a flag and ds_config give the same
    setting, the value of ds_config counts.
    """
    flags = words_by_flag(argv)
    values = settings_of(SETTING_OF_FLAG, flags)
    # --expert-tensor-parallel-size changes nothing if it is this number.
    tensor_size = str(values.get("tensor", 1))
    not_counted = {}
    unknown = []
    for flag, following in flags.items():
        if flag in REASON_NOT_COUNTED:
            if not _is_value_without_effect(flag, " ".join(following), tensor_size):
                not_counted[flag] = REASON_NOT_COUNTED[flag]
        elif _reason_of_prefix(flag):
            not_counted[flag] = _reason_of_prefix(flag)
        elif flag not in SETTING_OF_FLAG and flag not in MODEL_OF_FLAG and not has_no_effect(flag):
            unknown.append(flag)

    config = ds_config.from_arguments(list(argv))  # None: the command line names no ds_config
    trainer_file = " ".join(flags.get("--deepspeed", []))
    if config is None and trainer_file.endswith(".json"):
        # transformers' Trainer and scripts like it: --deepspeed FILE
        config = ds_config.from_arguments([ds_config.FLAGS[0], trainer_file])
    if config is not None and not config.digest:
        # No digest: the content could not be read. The file is missing, or is no JSON.
        file_name = Path(config.path).name
        not_counted[file_name] = "cannot be read as JSON: its settings are not counted"
        config = None
    from_flags = Settings(values, flags, not_counted, tuple(unknown))
    if config is None:
        return from_flags
    return _with_config(from_flags, config)


def _with_config(from_flags: Settings, config: DsConfig) -> Settings:
    """Return the settings of a command line merged with those of its ds_config file.

    If both give a setting, the value of the file counts. Keys of the file that give no setting are
    handled like flags that give none:

    - A key that changes a step's time or memory is added to `not_counted`, with the reason why the
      prediction leaves it out.
    - A key without effect on time and memory is ignored.
    - A key in none of the tables of flags.py is added to `unknown`.

    Args:
        from_flags: Settings that the flags give.
        config: The ds_config file, which could be read.
    """
    file_name = Path(config.path).name
    # Nested keys are joined by dots. "auto" leaves a setting to DeepSpeed.
    value_of_key = {key: value for key, value in _leaves(config.content) if value != "auto"}

    # settings_of() reads a key like a flag that one word follows.
    config_values = settings_of(
        SETTING_OF_KEY, {key: [value] for key, value in value_of_key.items()}
    )
    not_counted = dict(from_flags.not_counted)
    unknown = list(from_flags.unknown)
    for key, value in value_of_key.items():
        # "" unless REASON_NOT_COUNTED has the key, or a table that contains it.
        key_or_table = _key_not_counted(key)
        if key_or_table:
            if not _is_value_without_effect(key_or_table, str(value)):
                not_counted[f"{file_name}: {key_or_table}"] = REASON_NOT_COUNTED[key_or_table]
        elif key not in SETTING_OF_KEY and not key.startswith(KEY_PREFIXES_WITHOUT_EFFECT):
            unknown.append(f"{file_name}: {key}")

    overruled = []
    for name, value in config_values.items():
        # The ZeRO stage needs no message: Megatron-DeepSpeed itself uses that of ds_config.
        if name == "zero" or name not in from_flags.values:
            continue
        flag_value = from_flags.values[name]
        if flag_value != value:
            setting = name.replace("_", " ")
            overruled.append(
                f"{setting} {value} of {file_name} counts, not {flag_value} of the flags"
            )
    return Settings(
        values=from_flags.values | config_values,
        flags=from_flags.flags,
        not_counted=not_counted,
        unknown=tuple(dict.fromkeys(unknown)),  # without duplicates
        overruled=tuple(overruled),
    )


def _key_not_counted(key: str) -> str:
    """Return the name under which REASON_NOT_COUNTED has a key of ds_config, or "" if it has not.

    REASON_NOT_COUNTED has flags and keys that change a step, but are not counted in its prediction.
    The name is the key itself, or a table that contains it: "curriculum_learning" stands for all keys
    of that table, such as "curriculum_learning.enabled".
    """
    for entry in REASON_NOT_COUNTED:
        if key == entry or key.startswith(f"{entry}."):
            return entry
    return ""


def _reason_of_prefix(flag: str) -> str:
    """Return why the prediction of a step does not count a flag such as --lora-rank.

    The flag begins with an entry of REASON_OF_PREFIX ("--lora"). The result is "" for other flags.
    """
    for prefix, reason in REASON_OF_PREFIX.items():
        if flag.startswith(prefix):
            return reason
    return ""


def has_no_effect(flag: str) -> bool:
    """Return whether a flag changes neither the time nor the memory of a step.

    FLAG_PREFIXES_WITHOUT_EFFECT lists the beginnings of such flags. A beginning has to end where a word of
    the flag's name ends: --save stands for --save and --save-interval, but not for --saved. If it ends in a
    hyphen itself (--log-), it stands for all flags that begin so.
    """
    for prefix in FLAG_PREFIXES_WITHOUT_EFFECT:
        if not flag.startswith(prefix):
            continue
        next_character = flag[len(prefix) : len(prefix) + 1]
        if prefix.endswith("-") or next_character in ("", "-", "_"):
            return True
    return False


def settings_of(
    table: Mapping[str, SettingRule], words_of: Mapping[str, Sequence[Any]]
) -> dict[str, Any]:
    """Return the settings that flags of a command line, or keys of a ds_config file, give.

    If two flags give the same setting, the later one in the table counts.

    Args:
        table: Flag or key -> name of the setting that it gives, and how its words become the value.
        words_of: Flag or key -> the words that follow it. It may have flags that the table does not have.

    Returns:
        Name of a setting -> value. A setting with invalid words, such as "x" for a number, is left out.
    """
    settings = {}
    for name, rule in table.items():
        if name not in words_of:
            continue
        value = _convert(rule.conversion, words_of[name])
        if value is not None:  # the words are valid
            settings[rule.setting] = value
    return settings


def _convert(conversion: Any, words: Sequence[Any]) -> Any:
    """Convert the words after a flag into the value of its setting; None if they are invalid.

    Args:
        conversion: A type that converts the words (int, float, str; list for several whole numbers), a
            dictionary that translates the first word, or the value itself if the flag takes no words.
        words: The words after the flag. The value of a ds_config key is a single word of any JSON type.
    """
    first = words[0] if words else ""
    if conversion is int:
        return int(first) if _is_whole_number(str(first)) else None
    if conversion is list:
        return [int(word) for word in words if _is_whole_number(word)] or None
    if conversion is float:
        is_number = str(first).replace(".", "", 1).isdecimal()
        return float(first) if is_number else None
    if conversion is str:
        return str(first) or None
    if isinstance(conversion, dict):
        default = conversion.get("")  # for all words that the dictionary does not have
        return conversion.get(first, default)
    return conversion


def _is_whole_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_DIGITS


def _is_value_without_effect(name: str, value: str, tensor_size: str = "") -> bool:
    """Return whether a flag, or a key of ds_config, has a value that changes nothing.

    The table VALUES_WITHOUT_EFFECT lists such values. For example
    "--cp-comm-type p2p" gives the default. The table's value "tensor" stands for the
    tensor-parallel size of the job: --expert-tensor-parallel-size changes nothing if it is the same
    number.

    Args:
        name: The flag or key.
        value: The words after the flag, or the value of the key.
        tensor_size: The tensor-parallel size of the job, for flags; "" for keys, of which none
            needs it.
    """
    values_without_effect = VALUES_WITHOUT_EFFECT.get(name, ())
    if "tensor" in values_without_effect and value == tensor_size:
        return True
    return value in values_without_effect


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each value in nested dictionaries; keys are joined by dots: "fp16.enabled".

    A dictionary with "enabled": false yields nothing, because its other values have no effect.
    """
    for key, value in table.items():
        if not isinstance(value, dict):
            yield prefix + key, value
        elif value.get("enabled", True) is not False:
            yield from _leaves(value, f"{prefix}{key}.")
