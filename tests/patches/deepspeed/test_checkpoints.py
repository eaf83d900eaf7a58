import json
from types import SimpleNamespace

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed import checkpoints
from holmes_ext.patches.deepspeed.checkpoints import Split
from holmes_ext.runtime import session

pytest.importorskip("deepspeed")


class Module(SimpleNamespace):
    __hash__ = object.__hash__


def module(parts):
    return Module(parts=parts, num_stages=len(parts) - 1,
                  _layer_specs=["embed", *["transformer"] * 4, "norm", "head"])


def test_a_checkpoint_without_a_record_is_stocks(tmp_path):
    for index in range(2):
        (tmp_path / f"mp_rank_0{index}_model_states.pt").touch()
    planned = module([0, 2, 7])
    assert checkpoints.saved_split(tmp_path, planned, 1) == Split((0, 2, 7), 1)
    checkpoints.stock_parts[planned] = [0, 3, 7]
    assert checkpoints.saved_split(tmp_path, planned, 1) == Split((0, 3, 7), 1)
    assert str(checkpoints.saved_split(tmp_path, module([0, 2, 4, 6, 7]), 1)) == "2 stages x tensor ranks"


def test_the_record_decides(tmp_path):
    record = tmp_path / checkpoints.SPLIT
    record.write_text(json.dumps({"version": 1, "tensor": 1, "parts": [0, 2, 7]}))
    for tensor in (1, 2):
        assert checkpoints.saved_split(tmp_path, module([0, 3, 7]), tensor) == Split((0, 2, 7), 1)
    assert (
        str(Split((0, 2, 7), 1)) == "stages of 2+5 modules"
        and str(Split((0, 2), 2)) == "stages of 2 modules x tensor 2"
    )
    record.write_text("{")
    with pytest.raises(HolmesError, match="holmes_split.json: damaged"):
        checkpoints.saved_split(tmp_path, module([0, 2, 7]), 1)


def test_latest_names_a_checkpoint_when_all_of_it_is_there(tmp_path, monkeypatch):
    """Whatever ends the job while it is saved, the former one is still named."""
    import deepspeed.comm

    monkeypatch.setattr(session, "active", lambda: object())
    barriers = []
    monkeypatch.setattr(deepspeed.comm, "barrier", lambda: barriers.append((tmp_path / "latest").read_text()))
    engine = SimpleNamespace(
        global_rank=0, global_steps=7, module=module([0, 2, 7]), grid=SimpleNamespace(model_parallel_size=1),
        checkpoint_engine=SimpleNamespace(is_decoupled=lambda: False),
    )  # fmt: skip

    def save(save_dir, tag=None, client_state={}, save_latest=True):  # noqa: B006 - as DeepSpeed's
        assert checkpoints.saved_split(tmp_path / tag, engine.module, 1) == Split((0, 2, 7), 1)
        assert not save_latest and (tmp_path / "latest").read_text() == "former"
        if client_state:
            raise OSError("full")
        return True

    for args, kwargs, named in (
        ((str(tmp_path), "mine"), {}, "mine"), ((str(tmp_path),), {"save_latest": True}, "global_step7"),
        ((str(tmp_path), "x", {}, False), {}, "former"),
    ):  # fmt: skip
        (tmp_path / "latest").write_text("former")
        assert checkpoints._save_with_split(save, engine, args, kwargs) is True
        assert (tmp_path / "latest").read_text() == named
    assert barriers == ["mine", "global_step7"]
    with pytest.raises(OSError, match="full"):
        checkpoints._save_with_split(save, engine, (str(tmp_path), "new", {"x": 1}), {})
    assert (tmp_path / "latest").read_text() == "former"


def test_the_way_out_is_what_the_checkpoint_allows(tmp_path):
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from torch.nn import Embedding, Linear

    embedding = TiedLayerSpec("embed", Embedding)
    here = module([0, 3, 7])
    here._layer_specs = [embedding, *[LayerSpec(Linear)] * 4, len, embedding]
    record = tmp_path / checkpoints.SPLIT

    def way_out():
        return checkpoints.ways_out(tmp_path, checkpoints.saved_split(tmp_path, here, 1), Split((0, 3, 7), 1),
                                   here)

    record.write_text(json.dumps({"version": 1, "tensor": 1, "parts": [0, 2, 7]}))
    text = way_out()
    assert text.startswith(
        "resume with --holmes-partition 1,3, or it cannot be converted, having no ZeRO files")
    (tmp_path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    text = way_out()
    assert text.startswith(
        "resume with --holmes-partition 1,3, or convert it once: python -m "
        "deepspeed.checkpoint.ds_to_universal"
    )
    for parts, tensor in (
        ([0, 1, 7], 1),
        ([0, 2, 4, 7], 1),
        ([0, 2, 7], 2),
    ):  # no plan makes these, or not in this job's sizes
        record.write_text(json.dumps({"version": 1, "tensor": tensor, "parts": parts}))
        assert way_out().startswith("convert it once")
