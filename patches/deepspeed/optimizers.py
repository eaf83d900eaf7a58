"""Table of the optimizers that DeepSpeed makes for a ds_config, and of their bytes per parameter on a GPU.

DeepSpeed chooses among four optimizers, in engine._do_optimizer_sanity_check. The bytes are those of Adam
in 16 bits: d is the data-parallel size, a the bytes of a sum of gradients (data_types.grad_accum_dtype).
The first row that fits counts. "2, or a + 2" depends on the release and the settings (ZeRO 1 below).

    optimizer            when                                     weight   gradient        optimizer states
    the plain one        fp32, ZeRO 0                             4        4               8
    FP16_Optimizer       fp16, or bf16 without pipeline, ZeRO 0   2        2               12
    BF16_Optimizer       bf16: ZeRO 0 with a pipeline; ZeRO 1     2        a + 2           12 / d
                         with grad_accum_dtype fp32
    ZeRO (stages 1, 2)   else, ZeRO 1                             2        2, or a + 2     12 / d
                         ZeRO 2                                   2        (a + 2) / d     12 / d
    ZeRO (stage 3)       ZeRO 3                                   2 / d    a / d           12 / d

Details behind the columns:

    BF16_Optimizer   sums gradients in a flat buffer of grad_accum_dtype, beside the 16-bit gradients of the
                     last backward pass (bf16_optimizer.py: fp32_groups_gradients_flat, clear_lp_grads). It
                     shards optimizer states even at ZeRO 0, and ignores offload_optimizer.
    ZeRO 1           sums in .grad, or in a second tensor .grad_accum if the sums have another type
                     (stage_1_and_2.py: use_grad_accum_attribute).
    ZeRO 2           keeps the micro-batch's own 16-bit gradients of its shard until the backward pass ends,
                     and adds them to the sums then (independent_gradient_partition_epilogue).
    ZeRO in fp32     keeps its own 32-bit copy of the weights too (single_partition_of_fp32_groups).
    offload          ZeRO 1, 2 and 3 keep optimizer states in the host's memory, 2 and 3 also the sums of
                     gradients. ZeRO 0 cannot: DeepSpeedCPUAdam refuses parameters on a GPU.

Releases differ in three points; _BEHAVIOUR_SINCE has them. Read were the sources of the first and last
releases of the minor versions from 0.14.4 to 0.19.8, and of the releases around each change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from packaging.version import Version

from holmes_ext.errors import HolmesError
from holmes_ext.patches.engine.patch import UNKNOWN, installed_version, release_of
from holmes_ext.plan.cost.model import Mode, StateBytes, sharded_by

#: Newest release that the table above was checked against. It is assumed where DeepSpeed is not installed.
NEWEST_READ = "0.19.8"
PRECISIONS = ("fp32", "fp16", "bf16")
#: Bytes of an element.
WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}
PLAIN, FP16, BF16, ZERO = OPTIMIZERS = ("plain", "FP16_Optimizer", "BF16_Optimizer", "ZeRO")
#: ZeRO stage that shards gradients, and the stage that shards weights too.
_ZERO_GRADIENTS, _ZERO_WEIGHTS = 2, 3


@dataclass(frozen=True)
class Changes:
    """Behaviour of a release of DeepSpeed, in the points where releases differ."""

    #: Whether bf16 at ZeRO 0 sums gradients in fp32 unless data_types.grad_accum_dtype says otherwise.
    sums_bf16_in_fp32: bool
    #: Whether bf16 at ZeRO 0 may sum gradients in fp32 (in BF16_Optimizer: it shards optimizer states).
    accepts_fp32_sums: bool
    #: Whether bf16 at ZeRO 0 may sum gradients in bf16 without a pipeline (in FP16_Optimizer).
    accepts_bf16_sums: bool


#: First release of a behaviour -> the behaviour, from the oldest release to the newest.
_BEHAVIOUR_SINCE = {
    "0": Changes(sums_bf16_in_fp32=True, accepts_fp32_sums=True, accepts_bf16_sums=False),
    "0.17.6": Changes(sums_bf16_in_fp32=False, accepts_fp32_sums=True, accepts_bf16_sums=True),
    "0.18.5": Changes(sums_bf16_in_fp32=False, accepts_fp32_sums=False, accepts_bf16_sums=True),
}


@dataclass(frozen=True)
class TrainingTypes:
    """Number formats and offload of a ds_config. They decide the optimizer that DeepSpeed makes."""

    precision: str = "fp32"  # of the weights, one of PRECISIONS
    #: data_types.grad_accum_dtype: type of the sums of gradients over micro-batches; "": DeepSpeed's default.
    sums: str = ""
    #: zero_optimization.offload_optimizer.device: "cpu", "nvme", or "" for none.
    offload: str = ""
    #: Bytes of an optimizer's moments for one parameter: 8 for Adam.
    moment_bytes: float = 8.0


@dataclass(frozen=True)
class Optimizer:
    """Optimizer that DeepSpeed makes, and the bytes that it keeps for one parameter."""

    name: str  # one of OPTIMIZERS
    state: StateBytes
    sums: str  # type of the sums of gradients over micro-batches


def release() -> str:
    """Return the installed release of DeepSpeed, such as "0.16.9".

    If DeepSpeed is not installed, or its release is not known, the result is NEWEST_READ: the newest
    release that this module's table was checked against.
    """
    installed = installed_version("deepspeed")
    if installed is None or release_of(installed) == UNKNOWN:
        return NEWEST_READ
    return str(release_of(installed))


def optimizer_of(types: TrainingTypes, mode: Mode, version: str) -> Optimizer:
    """Return the optimizer that a release of DeepSpeed makes.

    Args:
        types: Precision, type of the sums of gradients, and offload.
        mode: ZeRO stage, and whether DeepSpeed's pipeline engine runs.
        version: Release of DeepSpeed, such as "0.16.9".

    Raises:
        HolmesError: This release refuses the combination. The message names the keys to change.
    """
    _check_offload(types, mode)
    if mode.zero > 1 and mode.has_pipeline:
        way_out = "set zero_optimization.stage to 0 or 1"
        raise HolmesError(
            f"ds_config: ZeRO {mode.zero} is refused by DeepSpeed's pipeline engine; {way_out}"
        )
    behaviour = _behaviour_of(version)
    sums = types.sums or _default_sums(types, mode, behaviour)
    name = _name_of(types, mode, sums, behaviour, version)
    return Optimizer(name, _state_of(name, types, mode, sums), sums)


def state_of_mode(types: TrainingTypes, version: str) -> dict[Mode, StateBytes]:
    """Return the bytes of a parameter for each ZeRO stage, with and without a pipeline.

    Modes that this release of DeepSpeed refuses are missing.
    """
    states = {}
    for zero in range(_ZERO_WEIGHTS + 1):
        for has_pipeline in (False, True):
            mode = Mode(zero, has_pipeline)
            try:
                states[mode] = optimizer_of(types, mode, version).state
            except HolmesError:
                continue
    return states


def _behaviour_of(version: str) -> Changes:
    """Look up the behaviour of a release of DeepSpeed, in the points where releases differ."""
    release = release_of(version)
    first_releases = [first for first in _BEHAVIOUR_SINCE if Version(first) <= release]
    return _BEHAVIOUR_SINCE[first_releases[-1]]


def _check_offload(types: TrainingTypes, mode: Mode) -> None:
    """Raise HolmesError if optimizer states are to be offloaded at ZeRO 0."""
    if types.offload and mode.zero == 0:
        raise HolmesError(
            "ds_config: zero_optimization.offload_optimizer needs ZeRO 1, 2 or 3, because DeepSpeedCPUAdam "
            "refuses parameters on a GPU; set zero_optimization.stage, or remove offload_optimizer"
        )


def _default_sums(types: TrainingTypes, mode: Mode, behaviour: Changes) -> str:
    """Return the type of the sums of gradients if data_types.grad_accum_dtype is not set.

    The sums are those over the micro-batches of a step. DeepSpeed chooses their type in
    DeepSpeedEngine.get_data_types().

    Returns:
        "fp32", "fp16" or "bf16".
    """
    if types.precision == "bf16" and mode.zero == 0 and behaviour.sums_bf16_in_fp32:
        return "fp32"
    return types.precision


def _name_of(types: TrainingTypes, mode: Mode, sums: str, behaviour: Changes, version: str) -> str:
    """Return the name of the optimizer that DeepSpeed makes, one of OPTIMIZERS.

    The conditions are those of DeepSpeedEngine._do_optimizer_sanity_check(): it chooses the
    optimizer.

    Args:
        types: Precision and offload.
        mode: ZeRO stage, and whether there is a pipeline.
        sums: Type of the sums of gradients over micro-batches: "fp32", "fp16" or "bf16".
        behaviour: Types that this release accepts at ZeRO 0.
        version: The release, for the error message.

    Raises:
        HolmesError: The release refuses the types.
    """
    precision = types.precision
    if mode.zero > 0:
        # bf16 with sums in fp32 has BF16_Optimizer at ZeRO 1. It cannot offload: with the device "cpu"
        # DeepSpeed makes ZeRO's optimizer instead. With "nvme" it keeps BF16_Optimizer, without offload.
        is_bf16_optimizer = (precision, sums, mode.zero) == ("bf16", "fp32", 1)
        return BF16 if is_bf16_optimizer and types.offload != "cpu" else ZERO
    if precision == "fp32" and sums == "fp32":
        return PLAIN
    if precision == "fp16" and sums == "fp16":
        return FP16
    if precision == "bf16" and sums == "bf16":
        if mode.has_pipeline:
            return BF16
        if behaviour.accepts_bf16_sums:
            return FP16
    if precision == "bf16" and sums == "fp32" and behaviour.accepts_fp32_sums:
        return BF16
    raise HolmesError(
        f"ds_config: DeepSpeed {version} cannot sum {precision} gradients in {sums} at ZeRO 0; set "
        "zero_optimization.stage to 1, or change data_types.grad_accum_dtype"
    )


def _state_of(name: str, types: TrainingTypes, mode: Mode, sums: str) -> StateBytes:
    """Return the bytes of GPU memory that an optimizer keeps for one parameter, and which it shards.

    The gradient may take two parts of memory: that of the last backward pass, in the type of the weights,
    and the sum over the micro-batches, in the type `sums`. An optimizer that adds up in the first part
    keeps no second one. The module's docstring has the table.

    Args:
        name: Name of the optimizer, one of OPTIMIZERS.
        types: Precision, offload and moments.
        mode: ZeRO stage, and whether there is a pipeline.
        sums: Type of the sums of gradients over micro-batches: "fp32", "fp16" or "bf16".
    """
    width = float(WIDTHS[types.precision])
    gradient_and_sum_bytes = width + WIDTHS[sums]  # with both parts
    main_weight_bytes = 0.0 if name == PLAIN else 4.0  # the copy of the weights in 32 bits
    state = StateBytes(
        weights=width, gradients=width, optimizer=main_weight_bytes + types.moment_bytes
    )
    if name in (PLAIN, FP16):
        return state
    if name == BF16:
        return replace(state, gradients=gradient_and_sum_bytes, sharded=("optimizer",))

    # The rest is ZeRO's own optimizer, at stages 1 to 3. Offloaded states take no memory of the GPU.
    if types.offload:
        state = replace(state, optimizer=0.0)
    sharded = sharded_by(mode.zero)
    if mode.zero == 1:
        # Every rank sums all gradients: in place, or in a second tensor if the types differ.
        gradients = width if sums == types.precision else gradient_and_sum_bytes
        return replace(state, gradients=gradients, sharded=sharded)

    # From ZeRO 2 on, a rank sums the gradients of its shard only. Offload moves these sums to the host too.
    if types.offload:
        return replace(state, gradients=0.0, sharded=sharded)
    if mode.zero == _ZERO_GRADIENTS:
        return replace(state, gradients=gradient_and_sum_bytes, sharded=sharded)

    # ZeRO 3 keeps the sums only.
    return replace(state, gradients=float(WIDTHS[sums]), sharded=sharded)
