"""Files of a version: a full one is a checkpoint, a delta has the numbers that changed.

holmes does not read these files. Any other format of your training stack is as good.
"""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def save_delta(folder, tensors, parent):
    """Write a delta: the elements of `tensors` whose values differ from `parent`, and their positions.

    Bits are compared, because 0.0 and -0.0 are equal as numbers.

    Args:
        folder: Folder of the delta, in which the file delta.safetensors is written.
        tensors: Name -> tensor, of the new version.
        parent: Name -> tensor, of the version to which the delta will be applied.
    """
    delta = {}
    for name, tensor in tensors.items():
        positions = (_bits(tensor) != _bits(parent[name])).nonzero().view(-1)
        if len(positions):
            delta[f"{name}:positions"] = positions.int()
            delta[f"{name}:values"] = tensor.view(-1)[positions]
    save_file(delta, Path(folder) / "delta.safetensors")


def _bits(tensor):
    """Return the bits of each number of a tensor as an integer, in one dimension."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(-1).view(integers[tensor.element_size()])


def apply_delta(folder, tensors):
    """Apply a delta: change tensors in place from the version before the delta to the version of the delta.

    Args:
        folder: Path of the folder in which save_delta() has written the delta.
        tensors: Name -> tensor, of the version to which the folder is a delta.
    """
    delta = load_file(Path(folder) / "delta.safetensors")
    for name, tensor in tensors.items():
        if f"{name}:positions" in delta:
            positions = delta[f"{name}:positions"].long()
            tensor.view(-1)[positions] = delta[f"{name}:values"]


def load(folders):
    """Load a version: read the tensors of a full version, and apply deltas to them.

    Args:
        folders: Paths of folders: first that of the full version, then those of the deltas in the order in
            which they are applied. `wait_for_version` and `current_folders` of holmes_ext.weights return
            such a list.

    Returns:
        Name -> tensor.
    """
    tensors = {}
    for file in sorted(Path(folders[0]).glob("*.safetensors")):
        tensors.update(load_file(file))
    for folder in folders[1:]:
        apply_delta(folder, tensors)
    return tensors


def clone(model):
    """Return a copy of the model's tensors in bfloat16, as they are published."""
    return {
        name: tensor.to(torch.bfloat16, copy=True) for name, tensor in model.state_dict().items()
    }


def digest(tensors):
    """Return the first 16 hexadecimal digits of the SHA-256 of the names and bits of all tensors."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
