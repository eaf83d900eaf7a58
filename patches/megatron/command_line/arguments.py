"""What a job's own command line says, as a job needs it at start-up: sizes, model, overlap."""

from __future__ import annotations

from holmes_ext.errors import HolmesError
from holmes_ext.patches.megatron.command_line.describe import describe, sizes_from
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.sizes import Sizes


def sizes_from_arguments(argv: list[str]) -> Sizes | None:
    """Sizes that `argv` names in Megatron's flags; None when it names none (see sizes_from)."""
    return sizes_from(argv)


def model_from_arguments(argv: list[str], needed: bool = True) -> Model | None:
    """The model that `argv` describes in Megatron's flags; None when it names neither layers, hidden size nor
    heads.

    GPUs are the nominal ones (150 TFLOP/s, no memory limit). HolmesError when only some of what a model needs
    is there, or it fits together badly; None then where it is not `needed`.
    """
    said = describe(argv)
    if said.trouble and needed:
        raise HolmesError(said.trouble)
    return said.model


def overlaps(option: str, argv: list[str]) -> bool:
    """Whether --holmes-overlap `option` reduces under the last backward; auto: where stages are."""
    return "--no-pipeline-parallel" not in argv if option == "auto" else option == "on"
