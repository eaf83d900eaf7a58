"""DeepSpeed's native pipeline checkpoints load only where they were split alike: say so before anything is read.

    save    beside the tag's files, holmes_split.json: which module starts each stage; `latest` only when every rank has written its files
            (DeepSpeed's rank 0 writes it as soon as its own are: a rank that dies meanwhile leaves a `latest` that cannot be loaded)
    load    compare; a checkpoint without that file was saved by stock, so its split is what stock makes of the same model
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

from holmes_ext.document import write_whole
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.patches.deepspeed.p2p import DEEPSPEED
from holmes_ext.patches.deepspeed.partition import borders_of, class_name, most_frequent
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.runtime import session

SPLIT = "holmes_split.json"
_SAVE = ("save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters")
#: PipelineModule -> the partition_method that it was made with.
_methods: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _remember_method(wrapped, instance, args, kwargs):
    """_partition_layers, which is the only place that is told the method and does not keep it."""
    method = args[0] if args else kwargs.get("method", "uniform")
    _methods[instance] = method.lower() if isinstance(method, str) else method
    return wrapped(*args, **kwargs)


def stock_parts(module: Any) -> list[int]:
    """The first module of each stage, and the end, as PipelineModule._partition_layers of DeepSpeed 0.19 chooses them."""
    from deepspeed.runtime import utils

    method, count = _methods[module], len(module._layer_specs)
    if not isinstance(method, str) or method[:1].isdecimal():  # the script's own borders (patches/deepspeed/partition.py): stock knows none
        return list(module.parts)
    if method == "uniform":
        return list(utils.partition_uniform(num_items=count, num_parts=module.num_stages))
    if method == "parameters":
        weights = module._count_layer_params()
    else:
        chosen = set(module._find_layer_type(method.partition(":")[2]))
        weights = [int(index in chosen) for index in range(count)]
    return list(utils.partition_balanced(weights=weights, num_parts=module.num_stages))


def _save_whole(wrapped, instance, args, kwargs):
    """save_checkpoint(save_dir, tag=None, client_state={}, save_latest=True, ...), which begins and ends with a barrier."""
    if session.active() is None:
        return wrapped(*args, **kwargs)
    given = {**dict(zip(_SAVE, args)), **kwargs}
    given["tag"] = str(given.get("tag") or f"global_step{instance.global_steps}")
    folder = Path(given["save_dir"], given["tag"])
    if instance.global_rank == 0 and hasattr(instance.module, "parts"):
        document = {"version": 1, "tensor": _tensor_size(instance), "parts": [int(part) for part in instance.module.parts]}  # numpy integers
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / SPLIT, json.dumps(document) + "\n")
    if not given.get("save_latest", True) or instance.checkpoint_engine.is_decoupled():
        return wrapped(**given)
    import deepspeed.comm as dist

    result = wrapped(**{**given, "save_latest": False})
    if instance.global_rank == 0:
        write_whole(folder.with_name("latest"), folder.name)
    dist.barrier()
    return result


def _tensor_size(engine) -> int:
    return engine.grid.model_parallel_size


def saved_split(folder: Path, module: Any, tensor: int) -> tuple[str, bool]:
    """How the checkpoint in `folder` is split, in words, and whether `module` under tensor size `tensor` is split so too."""
    parts, saved_tensor = _saved_parts(folder, module, tensor)
    if parts is None:
        return f"{saved_tensor} stages x tensor ranks", False
    return say(parts, saved_tensor), (parts, saved_tensor) == (list(module.parts), tensor)


def _saved_parts(folder: Path, module: Any, tensor: int) -> tuple[list[int] | None, int]:
    """The parts and tensor size of the checkpoint; (None, number of files) of one that stock saved with other sizes."""
    record = folder / SPLIT
    if record.exists():
        try:
            document = json.loads(record.read_text())
            return document["parts"], document["tensor"]
        except (ValueError, KeyError, TypeError):
            raise HolmesError(f"{record}: damaged; remove it if the checkpoint's split is that of stock DeepSpeed") from None
    files = len(list(folder.glob("mp_rank_*_model_states.pt")))  # one for each stage and tensor rank
    return (None, files) if files != module.num_stages * tensor else (stock_parts(module), tensor)


def way_out(folder: Path, module: Any, tensor: int) -> str:
    """What the user can do: the same split again, where the sizes allow it; the universal checkpoint, where there is something to convert."""
    parts, saved_tensor = _saved_parts(folder, module, tensor)
    ways = []
    if parts is not None and (len(parts), saved_tensor) == (len(module.parts), tensor):
        if layers := layers_of(module, parts):
            ways.append(f"resume with --holmes-partition {','.join(map(str, layers))}")
    if any(folder.glob("*zero_pp_rank_*_optim_states.pt")):
        ways.append(
            f"convert it once: python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder}"
            f" --output_folder {folder}_universal, with --inject_missing_state where the program is not Megatron-DeepSpeed, then load with --universal-checkpoint (load_universal in ds_config's 'checkpoint')"
        )
    else:
        ways.append("it cannot be converted, having no ZeRO files: save with ZeRO 1 or bf16, or take the weights alone (--finetune)")
    return ", or ".join(ways)


def layers_of(module: Any, parts: list[int]) -> list[int]:
    """Transformer blocks of each stage, where a plan of so many makes just these parts; else []."""
    names = [class_name(spec) for spec in module._layer_specs]
    blocks = most_frequent(names)
    layers = [names[start:end].count(blocks) for start, end in zip(parts, parts[1:])]
    return layers if blocks is not None and all(layers) and borders_of(names, layers, "") == parts else []


def say(parts: list[int], tensor: int) -> str:
    """ "stages of 4+7 modules", with the tensor size where there is one."""
    sizes = "+".join(str(end - start) for start, end in zip(parts, parts[1:]))
    return f"stages of {sizes} modules" + (f" x tensor {tensor}" if tensor > 1 else "")


def _refuse_other_split(wrapped, instance, args, kwargs):
    """load_checkpoint(load_dir, tag=None, ...) of a pipeline engine, unless it takes the universal checkpoint or the weights alone."""
    current = session.active()
    only = kwargs.get("load_module_only", False)
    if current is None or only or not hasattr(instance.module, "parts") or instance.load_universal_checkpoint():
        return wrapped(*args, **kwargs)
    load_dir = Path(args[0] if args else kwargs["load_dir"])
    tag = args[1] if len(args) > 1 else kwargs.get("tag")
    if tag is None and (load_dir / "latest").exists():
        tag = (load_dir / "latest").read_text().strip()
    folder = load_dir / str(tag)
    if folder.is_dir():
        tensor = _tensor_size(instance)
        text, same = saved_split(folder, instance.module, tensor)
        if not same and current.rank != 0:
            raise RemoteError("rank 0 says which split")
        if not same:
            raise HolmesError(
                f"{folder} was saved with {text}, this job has {say(list(instance.module.parts), tensor)}, and DeepSpeed's native checkpoints do not"
                f" load under another split; {way_out(folder, instance.module, tensor)}"
            )
    return wrapped(*args, **kwargs)


PATCHES = (
    Patch(
        feature="deepspeed-checkpoints",
        target="deepspeed.runtime.pipe.module:PipelineModule._partition_layers",
        versions=DEEPSPEED,
        parameters=("method",),
        wrap=_remember_method,
        reason="stock's own split of a model must be known to tell whether a checkpoint of stock fits",
    ),
    Patch(
        feature="deepspeed-checkpoints",
        target="deepspeed.runtime.engine:DeepSpeedEngine.save_checkpoint",
        versions=DEEPSPEED,
        parameters=_SAVE,
        wrap=_save_whole,
        reason="native checkpoints do not say how they are split; rank 0 names one in `latest` while others may still write it",
    ),
    Patch(
        feature="deepspeed-checkpoints",
        target="deepspeed.runtime.engine:DeepSpeedEngine.load_checkpoint",
        versions=DEEPSPEED,
        parameters=("load_dir", "tag", "load_module_only"),
        wrap=_refuse_other_split,
        reason="a native checkpoint of another split fails halfway, in errors that do not name the cause",
    ),
)
