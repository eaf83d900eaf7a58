"""Finds the number of rows of a model's embedding: the tokens of the vocabulary, and Megatron's padding."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

#: Tokens in GPT-2's vocabulary. It is assumed if no flag gives another number.
GPT2_VOCABULARY = 50257
#: Megatron pads the vocabulary to a multiple of this number x the tensor-parallel size.
VOCABULARY_MULTIPLE = 128
#: Text in a tokenizer's name or path, in lower case -> tokens in its vocabulary. The sources are the
#: files config.json (key vocab_size) of the models on huggingface.co. The first match counts.
VOCABULARY_OF_TOKENIZER = {
    "llama-3": 128256,
    "llama3": 128256,
    "llama-2": 32000,
    "llama2": 32000,
    "mixtral-8x7b": 32000,
    "mistral-7b": 32000,
    "qwen2": 151936,
    "qwen3": 151936,
    "deepseek-v2": 102400,
    "deepseek-v3": 129280,
    "deepseek-r1": 129280,
    "moonlight": 163840,
    "gemma-2": 256000,
    "falcon": 65024,
    "bloom": 250880,
    "facebook/opt": 50272,
    "bertwordpiece": 30522,
    "gpt-neox": 50432,
    "gpt2": 50257,
}


def vocabulary_tokens(settings: Mapping[str, Any], assumed: list[str]) -> int:
    """Return the number of tokens in the vocabulary, without padding.

    Without --vocab-size it is that of the named tokenizer if it is well known, otherwise that of GPT-2.
    Flags that give the padded number (--padded-vocab-size, --pad-vocab-size-to) take precedence.

    Args:
        settings: Name of a setting -> value.
        assumed: Lines for the user about assumptions; a line is appended if no flag gives the vocabulary.
    """
    for setting in ("padded_vocabulary", "vocabulary"):
        if settings.get(setting):
            return int(settings[setting])
    return _assumed_vocabulary(settings, assumed)


def padded_vocabulary(settings: Mapping[str, Any], tokens: int) -> int:
    """Return the number of rows of the embedding: the vocabulary, padded as Megatron pads it.

    Each tensor-parallel rank gets an equal number of rows, a multiple of --make-vocab-size-divisible-by.

    Args:
        settings: Name of a setting -> value.
        tokens: Tokens in the vocabulary, from vocabulary_tokens().
    """
    if "padded_vocabulary" in settings:
        return tokens
    multiple_of_rank = settings.get("divisible", VOCABULARY_MULTIPLE)  # 0: no padding
    multiple = multiple_of_rank * settings.get("tensor", 1)
    if not multiple:
        return tokens
    return ceil(tokens / multiple) * multiple


def padding_fields(settings: Mapping[str, Any], tokens: int) -> dict[str, int]:
    """Return the fields of Model (plan/cost/model.py) by which a plan pads the vocabulary.

    Megatron pads the vocabulary to a multiple that grows with the tensor-parallel size. The fields hold
    the number of tokens before padding, and the multiple for size 1, so that plans of other sizes can
    compute their own padding. The result is {} if a flag gives the padded number: it holds for all sizes.

    Args:
        settings: Name of a setting -> value.
        tokens: Tokens in the vocabulary, from vocabulary_tokens().
    """
    if "padded_vocabulary" in settings:
        return {}
    return {
        "vocabulary_tokens": tokens,
        "vocabulary_multiple": settings.get("divisible", VOCABULARY_MULTIPLE),
    }


def _assumed_vocabulary(settings: Mapping[str, Any], assumed: list[str]) -> int:
    """Return the vocabulary of the named tokenizer if it is well known, otherwise that of GPT-2.

    Args:
        settings: Name of a setting -> value.
        assumed: Lines for the user about assumptions. A line is appended.
    """
    # The path of --tokenizer-model says more than the class of --tokenizer-type.
    for setting in ("tokenizer_model", "tokenizer"):
        name = settings.get(setting, "")
        for text, vocabulary in VOCABULARY_OF_TOKENIZER.items():
            if text in name.lower():
                assumed.append(
                    f"vocabulary {vocabulary} (that of {text}, for tokenizer {name:.60}); "
                    "--vocab-size gives another"
                )
                return vocabulary
    tokenizer = f"{settings['tokenizer']}'s" if "tokenizer" in settings else "the tokenizer's"
    assumed.append(
        f"vocabulary {GPT2_VOCABULARY} (GPT-2's): {tokenizer} is not looked up; --vocab-size gives it"
    )
    return GPT2_VOCABULARY
