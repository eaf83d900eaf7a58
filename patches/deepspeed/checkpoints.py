"""Checks that a DeepSpeed pipeline checkpoint is loaded under the split that it was saved with.

The split of a checkpoint is the first module of each pipeline stage, and the number of tensor-parallel ranks.
DeepSpeed's native pipeline checkpoints load under no other split.

    save    Rank 0 records the split in holmes_split.json, in the checkpoint's folder. `latest`, the file that
            names the checkpoint to resume from, is written when all ranks have written their files.
    load    The recorded split is compared with that of the job. A checkpoint without holmes_split.json was
            saved without holmes, and has the split that DeepSpeed itself makes of the model.
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
from holmes_ext.patches.deepspeed.versions import read_by_version
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session

#: File in the folder of a checkpoint that records which modules each stage had when it was saved.
SPLIT = "holmes_split.json"


@with_session
@by_name
def _save_with_split(current, call, instance, save_dir, tag, save_latest):
    """Save a checkpoint with a record of its split, and name it in `latest` only when it is complete.

    A job resumes from the checkpoint that the file `latest` names. DeepSpeed's rank 0 writes `latest` as soon
    as its own files are written: if another rank dies before it has written its files, `latest` names an
    incomplete checkpoint. DeepSpeed is therefore called here without `latest`. That call ends with a barrier
    over all ranks; then rank 0 writes `latest`, and a second barrier keeps the other ranks from going on
    before that.
    """
    tag = str(tag or f"global_step{instance.global_steps}")  # DeepSpeed's default
    folder = Path(save_dir, tag)
    if instance.global_rank == 0 and hasattr(instance.module, "parts"):  # only a pipeline module has parts
        _record_split(folder, instance)
    if not save_latest:
        return call(tag=tag)
    if read_by_version("decoupled_checkpoint", instance):
        # This checkpoint engine writes its files in the background. Only DeepSpeed knows when they are
        # complete, and writes `latest` then.
        return call(tag=tag)
    import deepspeed.comm as dist

    result = call(tag=tag, save_latest=False)
    if instance.global_rank == 0:
        write_whole(folder.with_name("latest"), folder.name)
    dist.barrier()
    return result


def _record_split(folder: Path, engine: Any) -> None:
    """Write the split of a pipeline engine into holmes_split.json."""
    document = {
        "version": 1,
        "tensor": engine.grid.model_parallel_size,
        "parts": [int(part) for part in engine.module.parts],  # json does not accept numpy's integers
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SPLIT, json.dumps(document) + "\n")


@dataclass(frozen=True)
class Split:
    """Modules of each pipeline stage, and tensor-parallel size, of a checkpoint or a job."""

    parts: tuple[int, ...]  # the first module of each stage, and the end; () if only `files` is known
    tensor: int  # tensor-parallel ranks of each stage
    files: int = 0  # model files of a checkpoint, if they are not as many as this job's

    def __str__(self) -> str:
        """Return the split in words, e.g. "stages of 4+7 modules x tensor 2"."""
        if not self.parts:
            return f"{self.files} stages x tensor ranks"
        sizes = "+".join(str(end - start) for start, end in zip(self.parts, self.parts[1:]))
        text = f"stages of {sizes} modules"
        if self.tensor > 1:
            text += f" x tensor {self.tensor}"
        return text


def saved_split(folder: Path, module: Any, tensor: int) -> Split:
    """Return the split of the checkpoint in a folder.

    A checkpoint without holmes_split.json was saved without holmes. If it has as many files as a checkpoint
    of this job, its split is the one that DeepSpeed itself makes of the model.

    Args:
        module: The PipelineModule of this job.
        tensor: The tensor-parallel size of this job.

    Raises:
        HolmesError: holmes_split.json is damaged.
    """
    record = folder / SPLIT
    if record.exists():
        try:
            document = json.loads(record.read_text())
            return Split(parts=tuple(document["parts"]), tensor=document["tensor"])
        except (ValueError, KeyError, TypeError):
            way_out = "remove it if the checkpoint's split is stock DeepSpeed's"
            raise HolmesError(f"{record}: damaged; {way_out}") from None
    file_count = len(list(folder.glob("mp_rank_*_model_states.pt")))  # one for each stage and tensor rank
    if file_count != module.num_stages * tensor:
        return Split(parts=(), tensor=0, files=file_count)
    parts = stock_parts.get(module, module.parts)
    return Split(parts=tuple(map(int, parts)), tensor=tensor)


def ways_out(folder: Path, saved: Split, own_split: Split, module: Any) -> str:
    """Return in words how the user can still load a checkpoint of another split.

    - Resume with the saved layers of each stage, if the checkpoint has this job's number of stages and tensor
      ranks, and a plan can make its stages.
    - Convert the checkpoint to DeepSpeed's universal format, which needs files of a ZeRO or bf16 optimizer.
    """
    suggestions = []
    has_same_sizes = len(saved.parts) == len(own_split.parts) and saved.tensor == own_split.tensor
    if has_same_sizes:
        layers = layers_of(module, saved.parts)
        if layers:
            suggestions.append(f"resume with --holmes-partition {','.join(map(str, layers))}")
    has_optimizer_files = any(folder.glob("*zero_pp_rank_*_optim_states.pt"))
    if has_optimizer_files:
        suggestions.append(
            f"convert it once: python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder}"
            f" --output_folder {folder}_universal, with --inject_missing_state where the program is not"
            " Megatron-DeepSpeed, then load with --universal-checkpoint (load_universal in ds_config's "
            "'checkpoint')"
        )
    else:
        suggestions.append(
            "it cannot be converted, having no ZeRO files: save with ZeRO 1 or bf16, or take the "
            "weights alone (--finetune)"
        )
    return ", or ".join(suggestions)


def layers_of(module: Any, parts: Sequence[int]) -> list[int]:
    """Return the number of transformer blocks of each stage; [] if no plan makes exactly these stages.

    Args:
        parts: The first module of each stage, and the end.
    """
    names = [class_name(spec) for spec in module._layer_specs]
    block_class = most_frequent(names)
    if block_class is None:
        return []
    layers = [names[start:end].count(block_class) for start, end in zip(parts, parts[1:])]
    if not all(layers) or borders_of(names, layers, "") != list(parts):
        return []
    return layers


def tag_of(load_dir: str | Path, tag: str | None) -> str | None:
    """Return the tag of the checkpoint that DeepSpeed loads: the given one, or the one in `latest`."""
    if tag is not None:
        return tag
    latest = Path(load_dir, "latest")
    return latest.read_text().strip() if latest.exists() else None


@with_session
@by_name
def _refuse_other_split(current, call, instance, load_dir, tag, load_module_only):
    """Load a checkpoint, unless it is a native pipeline checkpoint with another split than the job's.

    Under another split of layers or tensors DeepSpeed fails halfway, in errors that do not name the cause.
    The universal checkpoint, and loading the weights alone, work with any split.

    Raises:
        HolmesError: The splits differ, on rank 0. The message names both, and what the user can do.
        RemoteError: The splits differ, on the other ranks: only rank 0 prints the message.
    """
    module = instance.module
    folder = Path(load_dir, str(tag_of(load_dir, tag)))
    is_pipeline = hasattr(module, "parts")
    if load_module_only or not is_pipeline or instance.load_universal_checkpoint():
        return call()  # loads under any split
    if not folder.is_dir():
        return call()  # DeepSpeed itself reports a missing folder

    own_split = Split(parts=tuple(map(int, module.parts)), tensor=instance.grid.model_parallel_size)
    saved = saved_split(folder, module, own_split.tensor)
    if saved == own_split:
        return call()
    if current.rank != 0:
        raise RemoteError("rank 0 says which split")
    raise HolmesError(
        f"{folder} was saved with {saved}, this job has {own_split}, and DeepSpeed's native checkpoints "
        f"do not load under another split; {ways_out(folder, saved, own_split, module)}"
    )


PATCHES = (
    Patch(CHECKPOINTS, "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint",
          "native checkpoints do not say how they are split; rank 0 names one in `latest` while others still "
          "write it", _save_with_split),
    Patch(CHECKPOINTS, "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint",
          "a native checkpoint of another split fails halfway, in errors that do not name the cause",
          _refuse_other_split),
)  # fmt: skip
