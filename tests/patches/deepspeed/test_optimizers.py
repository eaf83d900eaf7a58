"""Tests the table of DeepSpeed's optimizers: which one a ds_config gets, and its bytes per parameter.

The expected rows were read in the sources of the releases (engine._do_optimizer_sanity_check,
bf16_optimizer.py, zero/stage_1_and_2.py, zero/stage3.py). The installed release runs, too.
"""

from types import SimpleNamespace

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed import optimizers
from holmes_ext.patches.deepspeed.optimizers import TrainingTypes, optimizer_of, state_of_mode
from holmes_ext.plan.cost.model import Mode, StateBytes

OLDEST, NEWEST = "0.14.4", "0.19.8"
PIPELINE, NO_PIPELINE = True, False
OPTIMIZER = ("optimizer",)
GRADIENTS = ("optimizer", "gradients")
ALL = ("optimizer", "gradients", "weights")
REFUSED = None

#: (precision, grad_accum_dtype, offload, ZeRO stage, pipeline) -> optimizer and bytes per parameter,
#: the same in all releases.
ROWS = [
    (("fp32", "", "", 0, NO_PIPELINE), "plain", StateBytes(4, 4, 8)),
    (("fp32", "", "", 0, PIPELINE), "plain", StateBytes(4, 4, 8)),
    (("fp32", "", "", 1, PIPELINE), "ZeRO", StateBytes(4, 4, 12, OPTIMIZER)),
    (("fp16", "", "", 0, NO_PIPELINE), "FP16_Optimizer", StateBytes(2, 2, 12)),
    (("fp16", "", "", 0, PIPELINE), "FP16_Optimizer", StateBytes(2, 2, 12)),
    (("fp16", "fp32", "", 0, PIPELINE), REFUSED, None),
    (("fp16", "", "", 1, PIPELINE), "ZeRO", StateBytes(2, 2, 12, OPTIMIZER)),
    (("fp16", "fp32", "", 1, NO_PIPELINE), "ZeRO", StateBytes(2, 6, 12, OPTIMIZER)),
    (("fp16", "", "", 2, NO_PIPELINE), "ZeRO", StateBytes(2, 4, 12, GRADIENTS)),
    (("fp16", "fp32", "", 2, NO_PIPELINE), "ZeRO", StateBytes(2, 6, 12, GRADIENTS)),
    (("fp16", "", "", 2, PIPELINE), REFUSED, None),
    (("fp16", "", "", 3, NO_PIPELINE), "ZeRO", StateBytes(2, 2, 12, ALL)),
    (("fp16", "", "", 3, PIPELINE), REFUSED, None),
    (("fp16", "", "cpu", 0, NO_PIPELINE), REFUSED, None),
    (("fp16", "", "cpu", 0, PIPELINE), REFUSED, None),
    (("fp16", "", "cpu", 1, PIPELINE), "ZeRO", StateBytes(2, 2, 0, OPTIMIZER)),
    (("fp16", "", "cpu", 2, NO_PIPELINE), "ZeRO", StateBytes(2, 0, 0, GRADIENTS)),
    (("fp16", "", "nvme", 3, NO_PIPELINE), "ZeRO", StateBytes(2, 0, 0, ALL)),
    (("bf16", "", "", 1, PIPELINE), "ZeRO", StateBytes(2, 2, 12, OPTIMIZER)),
    (("bf16", "fp32", "", 1, PIPELINE), "BF16_Optimizer", StateBytes(2, 6, 12, OPTIMIZER)),
    (("bf16", "fp32", "", 1, NO_PIPELINE), "BF16_Optimizer", StateBytes(2, 6, 12, OPTIMIZER)),
    (("bf16", "fp32", "cpu", 1, PIPELINE), "ZeRO", StateBytes(2, 6, 0, OPTIMIZER)),
    (("bf16", "fp32", "nvme", 1, PIPELINE), "BF16_Optimizer", StateBytes(2, 6, 12, OPTIMIZER)),
    (("bf16", "fp32", "", 2, NO_PIPELINE), "ZeRO", StateBytes(2, 6, 12, GRADIENTS)),
    (("bf16", "", "", 3, NO_PIPELINE), "ZeRO", StateBytes(2, 2, 12, ALL)),
]
SHARDED_FP32_SUMS = ("BF16_Optimizer", StateBytes(2, 6, 12, OPTIMIZER))
SHARDED_BF16_SUMS = ("BF16_Optimizer", StateBytes(2, 4, 12, OPTIMIZER))
WHOLE_BF16_SUMS = ("FP16_Optimizer", StateBytes(2, 2, 12))
#: bf16 at ZeRO 0: (grad_accum_dtype, pipeline) -> what releases before 0.17.6, before 0.18.5 and since do.
CHANGED_ROWS = [
    (("", PIPELINE), SHARDED_FP32_SUMS, SHARDED_BF16_SUMS, SHARDED_BF16_SUMS),
    (("", NO_PIPELINE), SHARDED_FP32_SUMS, WHOLE_BF16_SUMS, WHOLE_BF16_SUMS),
    (("fp32", PIPELINE), SHARDED_FP32_SUMS, SHARDED_FP32_SUMS, REFUSED),
    (("fp32", NO_PIPELINE), SHARDED_FP32_SUMS, SHARDED_FP32_SUMS, REFUSED),
    (("bf16", PIPELINE), SHARDED_BF16_SUMS, SHARDED_BF16_SUMS, SHARDED_BF16_SUMS),
    (("bf16", NO_PIPELINE), REFUSED, WHOLE_BF16_SUMS, WHOLE_BF16_SUMS),
]
#: Last and first release of each behaviour.
RELEASES = (("0.14.4", "0.17.5"), ("0.17.6", "0.18.4"), ("0.18.5", "0.19.8"))


def made(types, mode, version):
    """Return the optimizer's name and bytes, or REFUSED."""
    try:
        optimizer = optimizer_of(types, mode, version)
    except HolmesError:
        return REFUSED
    return optimizer.name, optimizer.state


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("case, name, state", ROWS, ids=[str(row[0]) for row in ROWS])
def test_rows_that_all_releases_share(version, case, name, state):
    precision, sums, offload, zero, has_pipeline = case
    types = TrainingTypes(precision, sums, offload)
    expected = REFUSED if name is REFUSED else (name, state)
    assert made(types, Mode(zero, has_pipeline), version) == expected


@pytest.mark.parametrize("row", CHANGED_ROWS, ids=[str(row[0]) for row in CHANGED_ROWS])
def test_bf16_at_zero_0_by_release(row):
    (sums, has_pipeline), *by_release = row
    for versions, expected in zip(RELEASES, by_release):
        for version in versions:
            found = made(TrainingTypes("bf16", sums), Mode(0, has_pipeline), version)
            assert found == expected, version


def test_a_refusal_names_the_keys_to_change():
    with pytest.raises(
        HolmesError, match="offload_optimizer needs ZeRO 1, 2 or 3.*stage, or remove"
    ):
        optimizer_of(TrainingTypes("fp16", offload="cpu"), Mode(0, NO_PIPELINE), NEWEST)
    with pytest.raises(
        HolmesError, match="0.19.8 cannot sum bf16 gradients in fp32.*grad_accum_dtype"
    ):
        optimizer_of(TrainingTypes("bf16", sums="fp32"), Mode(0, PIPELINE), NEWEST)
    with pytest.raises(HolmesError, match="ZeRO 2 is refused by DeepSpeed's pipeline engine; set"):
        optimizer_of(TrainingTypes("bf16"), Mode(2, PIPELINE), NEWEST)


def test_refused_modes_are_missing():
    """With offload, ZeRO 0 is no choice; with a pipeline, ZeRO 2 and 3 are none."""
    modes = set(state_of_mode(TrainingTypes("fp16", offload="cpu"), NEWEST))
    assert modes == {Mode(zero, NO_PIPELINE) for zero in (1, 2, 3)} | {Mode(1, PIPELINE)}


@pytest.mark.parametrize(
    "installed, expected", [(None, "0.19.8"), ("0+unknown", "0.19.8"), ("0.16.9+abc", "0.16.9")]
)
def test_the_installed_release_counts(monkeypatch, installed, expected):
    monkeypatch.setattr(optimizers, "installed_version", lambda name: installed)
    assert optimizers.release() == expected


def engine_of_release(deepspeed, types, mode):
    """Return an object with the methods by which DeepSpeed's engine chooses its optimizer."""
    config = SimpleNamespace(grad_accum_dtype=types.sums or None)
    engine = SimpleNamespace(
        _config=config,
        fp16_enabled=lambda: types.precision == "fp16",
        bfloat16_enabled=lambda: types.precision == "bf16",
        zero_optimization=lambda: mode.zero > 0,
        zero_optimization_stage=lambda: mode.zero,
        zero_cpu_offload=lambda: types.offload == "cpu",
        zero_allow_untested_optimizer=lambda: True,
        zero_compute_grad_norm=lambda: True,
        amp_enabled=lambda: False,
        pipeline_parallelism=mode.has_pipeline,
        global_rank=1,
    )
    engine.get_data_types = lambda: deepspeed.DeepSpeedEngine.get_data_types(engine)
    return engine


@pytest.mark.parametrize("precision", optimizers.PRECISIONS)
def test_the_installed_deepspeed_chooses_as_the_table_does(monkeypatch, precision):
    """All modes, sums and offloads of a precision; offload at ZeRO 0 fails later, in the optimizer's step."""
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.runtime import engine as engine_module

    monkeypatch.setattr(engine_module, "is_zero_supported_optimizer", lambda optimizer: True)
    monkeypatch.setattr(engine_module.logger, "warning", lambda *words: None)
    name_of_choice = {
        None: "plain",
        engine_module.FP16: "FP16_Optimizer",
        engine_module.BFLOAT16: "BF16_Optimizer",
        getattr(engine_module, "DDP_BFLOAT16", "none"): "FP16_Optimizer",
        engine_module.ZERO_OPTIMIZATION: "ZeRO",
    }
    for sums in ("", precision, "fp32"):
        for offload in ("", "cpu", "nvme"):
            for zero in (0, 1) if offload == "" else (1,):
                for has_pipeline in (PIPELINE, NO_PIPELINE):
                    types = TrainingTypes(precision, sums, offload)
                    mode = Mode(zero, has_pipeline)
                    engine = engine_of_release(deepspeed, types, mode)
                    try:
                        choice = deepspeed.DeepSpeedEngine._do_optimizer_sanity_check(
                            engine, object()
                        )
                        expected = name_of_choice[choice]
                    except NotImplementedError:
                        expected = REFUSED
                    found = made(types, mode, optimizers.release())
                    assert (found and found[0]) == expected, (types, mode)
