"""Checkpoints and deltas of a small model for benchmarks/weights.py.

A Llama of transformers is trained on the text of this repository's pages, with the small learning rate of
reinforcement learning. Its weights are published in bfloat16. A delta has the elements that a step has
changed in bfloat16: for each tensor their indices and new values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from harness import tell
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

PAGES = Path(__file__).resolve().parents[1] / "docs"
LEARNING_RATE = 1e-6
_SEQUENCES, _LENGTH = 4, 64
_FILE = "model.safetensors"


class ModelVersion(NamedTuple):
    """A version of a model's weights on disk: a checkpoint, or a delta to the version before."""

    folder: Path
    parent: int | None  # version to which the folder is a delta; None: it is a checkpoint

    @property
    def size(self) -> int:
        """Return the bytes of all files of the version."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


def versions_of(folder: Path, width: int, layers: int, plan: str) -> list[ModelVersion]:
    """Return the versions of a model, version 1 first, after making those that the folder lacks.

    Args:
        folder: Folder for this model.
        width: Hidden size of the model.
        layers: Number of its transformer blocks.
        plan: For each version "full" (a checkpoint) or "delta", separated by spaces.
    """
    kinds = plan.split()
    list_file = folder / f"{len(kinds)}.json"
    if not list_file.exists():
        _make(folder, width, layers, kinds)
        list_file.write_text(json.dumps(kinds))
    versions = []
    for number, kind in enumerate(kinds, start=1):
        parent = number - 1 if kind == "delta" else None
        versions.append(ModelVersion(folder / str(number), parent))
    return versions


def _make(folder: Path, width: int, layers: int, kinds: list[str]) -> None:
    before: dict[str, torch.Tensor] = {}
    for number, weights in enumerate(_trained(width, layers, len(kinds)), start=1):
        version_folder = folder / str(number)
        version_folder.mkdir(parents=True, exist_ok=True)
        is_full = kinds[number - 1] == "full"
        save_file(weights if is_full else delta_of(before, weights), version_folder / _FILE)
        before = weights
        size = (version_folder / _FILE).stat().st_size
        tell(f"{version_folder}: {kinds[number - 1]}, {size / 1e6:.1f} MB")


def _trained(width: int, layers: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Train a small Llama, and yield its weights in bfloat16 after each step, by parameter name."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    text = b"".join(page.read_bytes() for page in sorted(PAGES.glob("*.md")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for step in range(steps):
        start = step * _SEQUENCES * _LENGTH
        batch = tokens[start : start + _SEQUENCES * _LENGTH].view(_SEQUENCES, _LENGTH)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield {
            name: tensor.detach().to(torch.bfloat16).clone()
            for name, tensor in model.named_parameters()
        }


def delta_of(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the elements of bfloat16 weights that differ between two versions.

    Returns:
        For each parameter that has changed, "NAME/indices" (in the flat tensor, int32) and "NAME/values".
    """
    delta: dict[str, torch.Tensor] = {}
    for name, tensor in after.items():
        changed = tensor.view(torch.int16).flatten() != before[name].view(torch.int16).flatten()
        indices = changed.nonzero().flatten()
        if len(indices):
            delta[f"{name}/indices"] = indices.to(torch.int32)
            delta[f"{name}/values"] = tensor.flatten()[indices]
    return delta


def weights_at(folders: list[Path]) -> dict[str, torch.Tensor]:
    """Load a checkpoint, apply deltas to it, and return the weights by parameter name.

    Args:
        folders: Folder of the checkpoint, then those of the deltas in their order.
    """
    weights = load_file(folders[0] / _FILE)
    for folder in folders[1:]:
        delta = load_file(folder / _FILE)
        for key, indices in delta.items():
            name, is_indices, _ = key.rpartition("/indices")
            if is_indices:
                weights[name].view(-1)[indices.long()] = delta[f"{name}/values"]
    return weights


def is_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Return whether two sets of weights are equal, bit by bit."""
    return first.keys() == second.keys() and all(
        torch.equal(tensor.view(torch.int16), second[name].view(torch.int16))
        for name, tensor in first.items()
    )
