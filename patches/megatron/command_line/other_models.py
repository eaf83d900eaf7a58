"""Recognizes models that are no stack of equal transformer blocks: holmes does not predict their steps.

Such a model is refused with the flag that shows it. Counted as a stack of equal blocks, its parameters and
its step time could be wrong by a factor of two: a Mamba layer has neither an MLP nor attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.megatron.command_line.flags import MODEL_OF_FLAG
from holmes_ext.patches.megatron.command_line.hybrid import HybridModel

#: Beginning of a training script's name -> layers of the model, in words for a message.
MODEL_OF_SCRIPT = {
    "pretrain_t5": "an encoder and a decoder",
    "pretrain_mamba": "several kinds of layers (Mamba, attention, MLP)",
    "pretrain_hybrid": "several kinds of layers (Mamba, attention, MLP)",
    "pretrain_retro": "a decoder with retrieval",
    "pretrain_ict": "two encoders",
    "pretrain_vision": "a model of images",
    "pretrain_mimo": "several models, for text, images and sound",
}
#: Texts in the value of --spec (a Python module or function with the layers of a model) that show layers of
#: several kinds. Example: --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec
_SPECS = ("mamba", "hybrid")


def refuse_other_models(
    flags: Mapping[str, Sequence[str]], script: str, hybrid: HybridModel | None = None
) -> None:
    """Raise HolmesError if a command line describes a model that holmes does not predict.

    Signs of such a model are a flag of MODEL_OF_FLAG, a text of _SPECS in the value of --spec, sequences of
    both an encoder and a decoder, and the name of a script of MODEL_OF_SCRIPT. The message quotes the sign,
    and names the layers of the model.

    Args:
        flags: Flag of the command line -> the words that follow it.
        script: File name of the training script, "" if it is not known.
        hybrid: Numbers of layers and parameters that the flags give for a model with several kinds of layers,
            for the message. Such a model is refused with None, too.

    Raises:
        HolmesError: The model has layers of several kinds, an encoder beside its decoder, or the
            script trains another model than a stack of transformer blocks.
    """
    for flag, model in MODEL_OF_FLAG.items():
        if flag in flags:
            raise _refusal(" ".join([flag, *flags[flag]]), _counted(model, hybrid))
    spec = " ".join(flags.get("--spec", ()))
    if any(text in spec.lower() for text in _SPECS):
        raise _refusal(f"--spec {spec}", _counted("several kinds of layers", hybrid))
    # T5 has a sequence of its encoder and another one of its decoder.
    if "--encoder-seq-length" in flags and "--decoder-seq-length" in flags:
        raise _refusal("--decoder-seq-length", "an encoder and a decoder")
    for beginning, model in MODEL_OF_SCRIPT.items():
        if script.startswith(beginning):
            raise _refusal(script, _counted(model, hybrid))


def _counted(model: str, hybrid: HybridModel | None) -> str:
    """Name the kinds of a model's layers, with its numbers of layers and parameters if they were counted."""
    if hybrid is None or not model.startswith("several kinds of layers"):
        return model
    return f"several kinds of layers ({hybrid})"


def _refusal(shown_by: str, model: str) -> HolmesError:
    """Create the error for a kind of model whose step time holmes does not predict.

    Args:
        shown_by: The flag with its value, or the script, that shows the kind of model.
        model: The layers of the model, in words.
    """
    return HolmesError(
        f"{shown_by:.80}: a model with {model} is not predicted, only stacks of equal transformer "
        "blocks; give one of about the same size with --holmes-model FILE"
    )


def with_task_of_script(
    settings: Mapping[str, Any], script: str, assumed: list[str]
) -> dict[str, Any]:
    """Return the settings with those that follow from the task of the training script.

    pretrain_bert.py trains the same transformer blocks as a GPT, with the vocabulary of BERT.

    Args:
        settings: Name of a setting -> value.
        script: File name of the training script, "" if it is not known.
        assumed: Lines for the user about assumptions; a line is appended for pretrain_bert.py.
    """
    if not script.startswith("pretrain_bert"):
        return dict(settings)
    assumed.append(f"a GPT of the same sizes: the pooler and the heads of {script} are not counted")
    return {"tokenizer": "BertWordPieceLowerCase", **settings}


def sequence_of_language_model(settings: Mapping[str, Any], assumed: list[str]) -> dict[str, Any]:
    """Return the settings with "layers" and "sequence" of the model's language part.

    Other flags than --num-layers and --seq-length may give the two numbers:

    - --encoder-num-layers and --encoder-seq-length are Megatron's other names of these flags.
    - In a script that trains on images and text, --decoder-seq-length is the sequence of the
      language model, and --seq-length is the sequence of the vision encoder. The former counts.

    Their settings ("encoder_layers", "encoder_sequence", "decoder_sequence") are removed.

    Args:
        settings: Name of a setting -> value.
        assumed: Lines for the user about assumptions; a line is appended if --decoder-seq-length counts.

    Raises:
        HolmesError: Both names of a number are given. Megatron refuses that.
    """
    changed = dict(settings)
    names = (
        ("layers", "--num-layers", "--encoder-num-layers"),
        ("sequence", "--seq-length", "--encoder-seq-length"),
    )
    for name, flag, other_flag in names:
        value = changed.pop(f"encoder_{name}", None)
        if value is None:
            continue
        if name in changed:
            raise HolmesError(f"Megatron refuses {flag} beside {other_flag}; remove one of them")
        changed[name] = value
    decoder_sequence = changed.pop("decoder_sequence", None)
    if decoder_sequence is not None and decoder_sequence != changed.get("sequence"):
        assumed.append(
            f"sequences of {decoder_sequence} tokens (--decoder-seq-length): only the language model "
            "is counted, not the encoder of --seq-length"
        )
        changed["sequence"] = decoder_sequence
    return changed
