"""DeepSpeed's native pipeline checkpoints load only where they were split alike: that is said beforehand.

    save    beside the tag's files, holmes_split.json: which module starts each stage; `latest` only when
            every rank has written its files (DeepSpeed's rank 0 writes it as soon as its own are: a rank that
            dies meanwhile leaves a `latest` that cannot be loaded)
    load    compare; without that file stock has saved it, and its split is what stock makes of the model
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.document import write_whole
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.patches.deepspeed.features import CHECKPOINTS
from holmes_ext.patches.deepspeed.partition import borders_of, class_name, most_frequent, stock_parts
from holmes_ext.patches.deepspeed.versions import ask
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session

#: File in the folder of a checkpoint that records which modules each stage had when it was saved.
SPLIT = "holmes_split.json"


@with_session
@by_name
def _save_whole(current, call, instance, save_dir, tag, save_latest):
    """Save a checkpoint with a record of its split, and name it in `latest` only when it is complete.

    DeepSpeed's rank 0 writes `latest` as soon as its own files are written. A rank that dies meanwhile leaves
    a `latest` that cannot be loaded. Here DeepSpeed saves without `latest`, which ends with a barrier over
    all ranks. Then rank 0 writes `latest`, and a second barrier makes the others wait for that.

    A decoupled checkpoint engine writes its files in the background: for it, `latest` stays DeepSpeed's task.
    """
    tag = str(tag or f"global_step{instance.global_steps}")  # DeepSpeed's default
    folder = Path(save_dir, tag)
    if instance.global_rank == 0 and hasattr(instance.module, "parts"):
        parts = [int(part) for part in instance.module.parts]  # json does not take numpy's integers
        document = {"version": 1, "tensor": instance.grid.model_parallel_size, "parts": parts}
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / SPLIT, json.dumps(document) + "\n")
    if not save_latest or ask("decoupled_checkpoint", instance):
        return call(tag=tag)
    import deepspeed.comm as dist

    result = call(tag=tag, save_latest=False)
    if instance.global_rank == 0:
        write_whole(folder.with_name("latest"), folder.name)
    dist.barrier()
    return result


@dataclass(frozen=True)
class Split:
    """parts: the first module of each stage, and the end; () where only `files` of other sizes are known."""

    parts: tuple[int, ...]
    tensor: int
    files: int = 0

    def __str__(self) -> str:
        """ "stages of 4+7 modules", with the tensor size where there is one."""
        if not self.parts:
            return f"{self.files} stages x tensor ranks"
        sizes = "+".join(str(end - start) for start, end in zip(self.parts, self.parts[1:]))
        return f"stages of {sizes} modules" + (f" x tensor {self.tensor}" if self.tensor > 1 else "")


def saved_split(folder: Path, module: Any, tensor: int) -> Split:
    """How the checkpoint in `folder` is split; one of stock's as stock splits `module`, if sizes fit."""
    record = folder / SPLIT
    if record.exists():
        try:
            document = json.loads(record.read_text())
            return Split(tuple(document["parts"]), document["tensor"])
        except (ValueError, KeyError, TypeError):
            way_out = "remove it if the checkpoint's split is stock DeepSpeed's"
            raise HolmesError(f"{record}: damaged; {way_out}") from None
    files = len(list(folder.glob("mp_rank_*_model_states.pt")))  # one for each stage and tensor rank
    if files != module.num_stages * tensor:
        return Split((), 0, files)
    return Split(tuple(map(int, stock_parts.get(module, module.parts))), tensor)


def ways_out(folder: Path, saved: Split, here: Split, module: Any) -> str:
    """What the user can do: the same split again, where the sizes allow it; the universal checkpoint, where
    there is something to convert."""
    ways, same_sizes = [], (len(saved.parts), saved.tensor) == (len(here.parts), here.tensor)
    if same_sizes and (layers := layers_of(module, saved.parts)):
        ways.append(f"resume with --holmes-partition {','.join(map(str, layers))}")
    if any(folder.glob("*zero_pp_rank_*_optim_states.pt")):
        ways.append(
            f"convert it once: python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder}"
            f" --output_folder {folder}_universal, with --inject_missing_state where the program is not"
            " Megatron-DeepSpeed, then load with --universal-checkpoint (load_universal in ds_config's "
            "'checkpoint')")
    else:
        ways.append("it cannot be converted, having no ZeRO files: save with ZeRO 1 or bf16, or take the "
                    "weights alone (--finetune)")  # fmt: skip
    return ", or ".join(ways)


def layers_of(module: Any, parts: Sequence[int]) -> list[int]:
    """Transformer blocks of each stage, where a plan of so many makes just these parts; else []."""
    names = [class_name(spec) for spec in module._layer_specs]
    blocks = most_frequent(names)
    layers = [names[start:end].count(blocks) for start, end in zip(parts, parts[1:])]
    fits = blocks is not None and all(layers) and borders_of(names, layers, "") == list(parts)
    return layers if fits else []


def tag_of(load_dir: str | Path, tag: str | None) -> str | None:
    """The tag that load_checkpoint takes where none is given."""
    latest = Path(load_dir, "latest")
    return latest.read_text().strip() if tag is None and latest.exists() else tag


@with_session
@by_name
def _refuse_other_split(current, call, instance, load_dir, tag, load_module_only):
    """Load a checkpoint, unless it is a native one of a pipeline engine with other layers on its stages.

    DeepSpeed's native pipeline checkpoints load only with the split of layers and tensors that they were
    saved with. Under another split DeepSpeed fails halfway, in errors that do not name the cause. The
    universal checkpoint, and loading the weights alone, work with any split.

    Raises:
        HolmesError: on rank 0; names both splits and what the user can do.
        RemoteError: on the other ranks, which leave the message to rank 0.
    """
    module = instance.module
    folder = Path(load_dir, str(tag_of(load_dir, tag)))
    loads_any_split = (
        load_module_only or not hasattr(module, "parts") or instance.load_universal_checkpoint()
    )
    if loads_any_split or not folder.is_dir():  # DeepSpeed itself reports a missing folder
        return call()

    own_split = Split(parts=tuple(map(int, module.parts)), tensor=instance.grid.model_parallel_size)
    saved = saved_split(folder, module, own_split.tensor)
    if saved == own_split:
        return call()
    if current.rank != 0:
        raise RemoteError("rank 0 says which split")
    raise HolmesError(
        f"{folder} was saved with {saved}, this job has {own_split}, and DeepSpeed's native checkpoints "
        f"do not load under another split; {ways_out(folder, saved, own_split, module)}")


PATCHES = (
    Patch(CHECKPOINTS, "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint",
          "native checkpoints do not say how they are split; rank 0 names one in `latest` while others still "
          "write it", _save_whole),
    Patch(CHECKPOINTS, "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint",
          "a native checkpoint of another split fails halfway, in errors that do not name the cause",
          _refuse_other_split),
)  # fmt: skip
