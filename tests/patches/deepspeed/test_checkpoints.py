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
    return Module(
        parts=parts,
        num_stages=len(parts) - 1,
        _layer_specs=["embed", *["transformer"] * 4, "norm", "head"],
    )


def test_a_checkpoint_without_a_record_is_stocks(tmp_path):
    for index in range(2):
        (tmp_path / f"mp_rank_0{index}_model_states.pt").touch()
    planned = module([0, 2, 7])
    assert checkpoints.saved_split(tmp_path, planned, 1) == Split((0, 2, 7), 1)
    checkpoints.stock_parts[planned] = [0, 3, 7]
    assert checkpoints.saved_split(tmp_path, planned, 1) == Split((0, 3, 7), 1)
    assert (
        str(checkpoints.saved_split(tmp_path, module([0, 2, 4, 6, 7]), 1))
        == "2 stages x tensor ranks"
    )


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
    """The file `latest` names a new checkpoint only after DeepSpeed has saved all of it.

    Until then, and if saving fails, `latest` names the former checkpoint.
    """
    import deepspeed.comm

    latest = tmp_path / "latest"
    named_at_barriers = []  # content of `latest` at each barrier
    monkeypatch.setattr(
        deepspeed.comm, "barrier", lambda: named_at_barriers.append(latest.read_text())
    )
    monkeypatch.setattr(session, "active", lambda: object())  # holmes is on
    # A PipelineModule of 7 layers whose two stages begin with layers 0 and 2.
    two_stages = module([0, 2, 7])
    engine = SimpleNamespace(
        global_rank=0,
        global_steps=7,
        module=two_stages,
        grid=SimpleNamespace(model_parallel_size=1),
        checkpoint_engine=SimpleNamespace(is_decoupled=lambda: False),
    )

    def deepspeeds_save(save_dir, tag=None, client_state={}, save_latest=True):  # noqa: B006 - as DeepSpeed's
        recorded = checkpoints.saved_split(tmp_path / tag, engine.module, tensor=1)
        assert recorded == Split(
            (0, 2, 7), tensor=1
        )  # the pipeline stages have been recorded before
        assert not save_latest  # the patch writes `latest` itself
        assert latest.read_text() == "former"
        if client_state:
            raise OSError("full")
        return True

    def save(*args, **kwargs):  # the patched save_checkpoint
        latest.write_text("former")
        # A wrapper gets the wrapped method, its object, and the positional and keyword arguments.
        return checkpoints._save_with_split(deepspeeds_save, engine, args, kwargs)

    assert save(str(tmp_path), "mine") is True
    assert latest.read_text() == "mine"
    assert save(str(tmp_path), save_latest=True) is True  # without a tag
    assert latest.read_text() == "global_step7"
    save_latest = False
    assert save(str(tmp_path), "x", {}, save_latest) is True
    assert latest.read_text() == "former"  # not written, and no barrier
    assert named_at_barriers == ["mine", "global_step7"]

    client_state = {"x": 1}  # deepspeeds_save raises an error for it
    with pytest.raises(OSError, match="full"):
        save(str(tmp_path), "new", client_state)
    assert latest.read_text() == "former"


def test_the_way_out_is_what_the_checkpoint_allows(tmp_path):
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from torch.nn import Embedding, Linear

    embedding = TiedLayerSpec("embed", Embedding)
    here = module([0, 3, 7])
    here._layer_specs = [embedding, *[LayerSpec(Linear)] * 4, len, embedding]
    record = tmp_path / checkpoints.SPLIT

    def way_out():
        return checkpoints.ways_out(
            tmp_path, checkpoints.saved_split(tmp_path, here, 1), Split((0, 3, 7), 1), here
        )

    record.write_text(json.dumps({"version": 1, "tensor": 1, "parts": [0, 2, 7]}))
    text = way_out()
    assert text.startswith(
        "resume with --holmes-partition 1,3, or it cannot be converted, having no ZeRO files"
    )
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
