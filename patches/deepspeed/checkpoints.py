"""Refuses to load a DeepSpeed pipeline checkpoint that was saved with other pipeline stages.

DeepSpeed's pipeline engine saves one file for each stage and tensor-parallel rank. It can load them only if
the job has the same stages and tensor-parallel size. Otherwise it fails halfway, and the error does not name
the cause. This module compares them first:

    save    Rank 0 writes holmes_split.json into the folder of the checkpoint. The file records the split: the
            first layer of each stage, and the tensor-parallel size.
    load    If the recorded split is not that of the job, the job ends with an error that names both splits. A
            checkpoint without holmes_split.json was saved without holmes: its split is the one that DeepSpeed
            itself makes of the model.

The module also delays the file `latest`. It names the checkpoint to resume from. Rank 0 writes it only
after all ranks have written their files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.document import load_json, read_text
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.files import write_whole
from holmes_ext.patches.deepspeed.features import CHECKPOINTS
from holmes_ext.patches.deepspeed.partition import (
    borders_of,
    class_name,
    most_frequent,
    stock_parts,
)
from holmes_ext.patches.deepspeed.versions import read_by_version
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.runtime.session import Session

#: File in the folder of a checkpoint that records the first layer of each pipeline stage when it was saved.
SPLIT = "holmes_split.json"


@with_session
@by_name
def _save_with_split(
    current: Session, call: Call, instance: Any, save_dir: Any, tag: Any, save_latest: Any
) -> Any:
    """Save a checkpoint, and name it in the file `latest` only when all ranks have written their files.

    A job resumes from the checkpoint that `latest` names. In DeepSpeed rank 0 writes `latest` after its own
    files. If another rank dies before it has written its files, `latest` names an incomplete checkpoint.

    For a pipeline engine, rank 0 also records the split: the first layer of each pipeline stage, and the
    tensor-parallel size.

    Args:
        current: Session of holmes in this process.
        call: Runs DeepSpeed's save_checkpoint.
        instance: The engine.
        save_dir: Folder of all checkpoints.
        tag: Name of this checkpoint's folder; None for DeepSpeed's default.
        save_latest: Whether to name the checkpoint in `latest`.
    """
    tag = str(tag or f"global_step{instance.global_steps}")  # DeepSpeed's default
    folder = Path(save_dir, tag)
    is_pipeline = hasattr(instance.module, "parts")
    if instance.global_rank == 0 and is_pipeline:
        _record_split(folder, instance)
    if not save_latest:
        return call(tag=tag)  # DeepSpeed's save_checkpoint
    if read_by_version("decoupled_checkpoint", instance):
        # This checkpoint engine of DeepSpeed writes files in the background. DeepSpeed writes `latest` when
        # they are complete.
        return call(tag=tag)
    import deepspeed.comm as dist

    result = call(tag=tag, save_latest=False)  # ends with a barrier over all ranks
    if instance.global_rank == 0:
        latest = folder.with_name("latest")
        write_whole(latest, folder.name)  # replaces the file at once: it is never incomplete
    dist.barrier()  # `latest` exists when save_checkpoint returns on any rank
    return result


def _record_split(folder: Path, engine: Any) -> None:
    """Write the first layer of each pipeline stage, and the tensor-parallel size, into holmes_split.json."""
    # int(): json does not accept numpy's integers.
    first_layers = [int(part) for part in engine.module.parts]
    document = {
        "version": 1,  # of the file's format
        "tensor": engine.grid.model_parallel_size,
        "parts": first_layers,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / SPLIT, json.dumps(document) + "\n")


@dataclass(frozen=True)
class Split:
    """Division of a model's layers into pipeline stages, with the tensor-parallel size.

    One Split describes this job, and another one the checkpoint that the job loads. Without
    conversion, the checkpoint can be loaded only if both are equal.
    """

    #: Index of the first layer of each stage, then the number of layers, e.g. (0, 4, 11); () if not
    #: known.
    parts: tuple[int, ...]
    tensor: int  # tensor-parallel ranks of each stage; 0 if not known
    files: int = 0  # if `parts` is not known: the number of model files of the checkpoint

    def __str__(self) -> str:
        """Return a text for messages, e.g. "stages of 4+7 modules x tensor 2".

        DeepSpeed calls the layers of a pipeline model "modules".

        If the layers of the stages are not known, only the product of both numbers is given, e.g.
        "8 stages x tensor ranks" for 4 stages of 2 tensor-parallel ranks. It is the number of the
        checkpoint's model files: DeepSpeed saves one for each stage and tensor-parallel rank.
        """
        if not self.parts:  # not known: `files` has the number of model files
            return f"{self.files} stages x tensor ranks"
        sizes = "+".join(str(end - start) for start, end in zip(self.parts, self.parts[1:]))
        text = f"stages of {sizes} modules"
        if self.tensor > 1:
            text += f" x tensor {self.tensor}"
        return text


def saved_split(folder: Path, module: Any, tensor: int) -> Split:
    """Return the pipeline stages and the tensor-parallel size of a saved checkpoint.

    - If the folder has the file holmes_split.json, the answer is in it.
    - Otherwise the checkpoint was saved without holmes. If it has as many files as this job would save,
      its stages are those that DeepSpeed itself makes of the model.
    - If it has another number of files, only this number is known.

    Args:
        folder: The folder of the checkpoint.
        module: The PipelineModule of this job.
        tensor: The tensor-parallel size of this job.

    Raises:
        HolmesError: holmes_split.json is damaged.
    """
    record = folder / SPLIT
    if record.exists():
        way_out = "remove it if the checkpoint was saved without holmes"
        try:
            document = load_json(record, way_out).values
            return Split(parts=tuple(document["parts"]), tensor=document["tensor"])
        except (HolmesError, KeyError, TypeError):  # not the JSON that _record_split writes
            raise HolmesError(f"{record}: damaged; {way_out}") from None

    # DeepSpeed saves one model file for each pipeline stage and tensor-parallel rank.
    saved_files = len(list(folder.glob("mp_rank_*_model_states.pt")))
    files_of_this_job = module.num_stages * tensor
    if saved_files != files_of_this_job:
        return Split(parts=(), tensor=0, files=saved_files)  # only the number is known

    # module.parts has the first layer of each stage. If holmes has replaced DeepSpeed's own values there,
    # stock_parts has kept these.
    parts = stock_parts.get(module, module.parts)
    return Split(parts=tuple(map(int, parts)), tensor=tensor)


def ways_out(folder: Path, saved: Split, job_split: Split, module: Any) -> str:
    """Return a text that says how the user can load a checkpoint that was saved with other pipeline stages.

    The text has up to two suggestions:

    - Give the stages of this job the layers of the saved stages. That is possible if checkpoint and job have
      the same number of stages and the same tensor-parallel size.
    - Convert the checkpoint to DeepSpeed's universal format. That is possible if the checkpoint has optimizer
      files of ZeRO or of BF16_Optimizer. If not, the text says so.

    Args:
        folder: The folder of the checkpoint.
        saved: Stages and tensor-parallel size of the checkpoint.
        job_split: Stages and tensor-parallel size of this job.
        module: The PipelineModule of this job.
    """
    suggestions = []
    has_same_sizes = len(saved.parts) == len(job_split.parts) and saved.tensor == job_split.tensor
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
    """Return how many transformer blocks each stage has, e.g. [4, 7], or [] if that is not enough.

    The user gets the result as a suggestion: --holmes-partition 4,7 makes stages with 4 and 7
    blocks. They must be the stages that `parts` describes. With that option, every stage but the
    first begins with a block. The result is therefore [] in two cases:

    - A stage has no block.
    - A stage other than the first begins with another layer, such as a norm between two blocks.

    Args:
        module: DeepSpeed's PipelineModule. It lists all layers of the model.
        parts: Index of the first layer of each stage, then the number of layers: (0, 4, 11).
    """
    names = [class_name(spec) for spec in module._layer_specs]
    block_class = most_frequent(names)  # the class of the transformer blocks
    if block_class is None:
        return []
    layers = [names[start:end].count(block_class) for start, end in zip(parts, parts[1:])]
    if not all(layers):  # a stage without blocks
        return []
    # borders_of() returns the stages that --holmes-partition makes of these numbers, in the form of
    # `parts`. `source` is only used in an error message.
    planned_parts = borders_of(names, layers, source="")
    if planned_parts != list(parts):  # a stage begins with another layer than a block
        return []
    return layers


def tag_of(load_dir: str | Path, tag: str | None) -> str | None:
    """Return the tag of the checkpoint that DeepSpeed will load, i.e. the name of its folder.

    Without a given tag, it is the content of the file `latest`; None if that file does not exist.
    """
    if tag is not None:
        return tag
    latest = Path(load_dir, "latest")
    if not latest.exists():
        return None
    return read_text(latest, "it has the name of the checkpoint to load").strip()


@with_session
@by_name
def _refuse_other_split(
    current: Session, call: Call, instance: Any, load_dir: Any, tag: Any, load_module_only: Any
) -> Any:
    """Load a checkpoint, or raise an error if it was saved with another split than this job has.

    The split is the first layer of each pipeline stage, and the tensor-parallel size. With another split,
    DeepSpeed's pipeline engine fails halfway, and its error does not name the cause. A universal checkpoint
    works with any split, and so does loading only the weights.

    Args:
        current: Session of holmes in this process.
        call: Runs DeepSpeed's load_checkpoint.
        instance: The engine.
        load_dir: Folder of all checkpoints.
        tag: Name of the checkpoint's folder; None for the one in `latest`.
        load_module_only: Whether to load the weights only.

    Raises:
        HolmesError: On rank 0, the splits differ. The message has both, and ways out.
        RemoteError: On other ranks, the splits differ. Only rank 0 prints the message.
    """
    module = instance.module
    is_pipeline = hasattr(module, "parts")
    works_with_any_split = (
        load_module_only or not is_pipeline or instance.load_universal_checkpoint()
    )
    if works_with_any_split:
        return call()  # DeepSpeed's load_checkpoint
    folder = Path(load_dir, str(tag_of(load_dir, tag)))  # tag_of() also reads the file `latest`
    if not folder.is_dir():
        return call()  # DeepSpeed reports the missing folder

    job_split = Split(parts=tuple(map(int, module.parts)), tensor=instance.grid.model_parallel_size)
    saved = saved_split(folder, module, job_split.tensor)
    if saved == job_split:
        return call()
    if current.rank != 0:
        raise RemoteError("rank 0 says which split")  # this error ends the rank without a message
    raise HolmesError(
        f"{folder} was saved with {saved}, this job has {job_split}, and DeepSpeed's native checkpoints "
        f"do not load under another split; {ways_out(folder, saved, job_split, module)}"
    )


PATCHES = (
    Patch(
        CHECKPOINTS,
        "deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint",
        "DeepSpeed does not record the stages of a checkpoint; rank 0 names it in `latest` while other "
        "ranks still write it",
        _save_with_split,
    ),
    Patch(
        CHECKPOINTS,
        "deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint",
        "a checkpoint of other stages fails halfway, with an error that does not name the cause",
        _refuse_other_split,
    ),
)
