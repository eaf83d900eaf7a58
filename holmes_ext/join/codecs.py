"""What travels between jobs: pseudo-gradients in fewer bytes.

    bf16, int8   as between the levels of a reduction (runtime/compress.py)
    2bit         of every element its sign, and which of two magnitudes it has: the two with the least squared
                 error in its chunk of 512 (Lloyd and Max), each the mean of the elements that are nearer to
                 it. What the rounding left out is added to the next pseudo-gradient of the same elements
                 (error feedback), as in MuLoCo (arXiv 2505.23725), which quantizes to 2 bits too

The wire of 2bit: of each chunk two magnitudes (bfloat16), then the codes: 12.9 % of bf16's bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from holmes_ext.join.settings import OuterSettings
from holmes_ext.runtime.compress import Codec as OuterCodec
from holmes_ext.runtime.compress import codec

#: Codes of two bits in one byte.
_CODES_PER_BYTE = 4
#: Bytes of the two magnitudes of a chunk.
_MAGNITUDE_BYTES = 4
#: Steps of Lloyd's algorithm, from the mean magnitude on; more take less than 0.5 % of the squared error away
#: (normal, Laplace).
_LLOYD_STEPS = 5


class _Block(NamedTuple):
    """Consecutive chunks of equal length, which are encoded together."""

    chunks: int
    width: int  # elements of a chunk, with zeros at its end up to a multiple of 4
    chunk_bytes: int  # bytes of an encoded chunk

    @property
    def wire_bytes(self) -> int:
        return self.chunks * self.chunk_bytes


class TwoBits(OuterCodec):
    """Codec that sends two bits of each element: its sign, and which of its chunk's two magnitudes it has.

    Each chunk has bytes of its own: the full chunks, and a shorter one at the end.
    """

    feedback = True
    saves_above = 0
    chunk = 512  # elements that share two magnitudes

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        size = sum(block.wire_bytes for block in self._blocks(like.numel()))
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        wanted = x.float() if residual is None else torch.add(x, residual)
        wire = self.buffer(x)
        element, byte = 0, 0
        for block in self._blocks(x.numel()):
            part = wanted[element : element + block.chunks * block.width]
            zeros = block.chunks * block.width - part.numel()
            rows = F.pad(part, (0, zeros)).view(block.chunks, block.width)
            wire[byte : byte + block.wire_bytes].view(block.chunks, -1).copy_(_encoded(rows))
            element += part.numel()
            byte += block.wire_bytes
        if residual is not None:
            torch.sub(wanted, self.decode(wire, wanted), out=residual).nan_to_num_(0.0, 0.0, 0.0)
        return wire

    def decode(self, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        decoded, byte = [], 0
        for block in self._blocks(like.numel()):
            rows = wire[byte : byte + block.wire_bytes].view(block.chunks, -1)
            decoded.append(_decoded(rows).view(-1))
            byte += block.wire_bytes
        if not decoded:
            return torch.empty_like(like)
        return torch.cat(decoded)[: like.numel()].to(like.dtype)

    def _blocks(self, numel: int) -> list[_Block]:
        """Return the full chunks of a tensor of `numel` elements, then the shorter one at its end."""
        full, remainder = divmod(numel, self.chunk)
        blocks = []
        if full:
            blocks.append(self._block(full, self.chunk))
        if remainder:
            blocks.append(self._block(1, remainder))
        return blocks

    def _block(self, chunks: int, elements: int) -> _Block:
        codes_bytes = -(-elements // _CODES_PER_BYTE)
        return _Block(chunks, codes_bytes * _CODES_PER_BYTE, _MAGNITUDE_BYTES + codes_bytes)


def _encoded(rows: torch.Tensor) -> torch.Tensor:
    """Return [chunks, bytes] of the values [chunks, width]."""
    width = rows.shape[1]
    sizes = rows.abs()
    middle = sizes.mean(1, keepdim=True)
    for _ in range(_LLOYD_STEPS):
        large = sizes > middle
        count = large.sum(1, keepdim=True)
        high = (sizes * large).sum(1, keepdim=True) / count.clamp(min=1)
        low = (sizes * ~large).sum(1, keepdim=True) / (width - count).clamp(min=1)
        middle = (low + high) / 2
    magnitudes = torch.cat([low, high], 1).bfloat16().view(torch.uint8)
    return torch.cat([magnitudes, _codes(rows, large)], 1)


def _codes(values: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """Return signs and choices of the magnitude, four in a byte: [chunks, width / 4] of [chunks, width]."""
    codes = (2 * (values < 0) + large).to(torch.uint8).view(len(values), -1, _CODES_PER_BYTE)
    return codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6


def _decoded(wire: torch.Tensor) -> torch.Tensor:
    """Return the values [chunks, width] of [chunks, bytes]; any bytes are some values."""
    magnitudes = wire[:, :_MAGNITUDE_BYTES].clone(memory_format=torch.contiguous_format)
    magnitudes = magnitudes.view(torch.bfloat16).float()
    packed = wire[:, _MAGNITUDE_BYTES:]
    codes = (
        torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 2).view(len(wire), -1).long()
    )
    return magnitudes.gather(1, codes & 1) * (1 - 2 * (codes >> 1))


def codec_of(settings: OuterSettings) -> OuterCodec:
    """Return the codec that `compress` names."""
    if settings.compress == "2bit":
        return TwoBits()
    return codec(settings.compress)


def residual_dtype(settings: OuterSettings) -> torch.dtype | None:
    """Return the dtype of the rounding errors that the codec adds the next time; None: it keeps none."""
    if settings.compress in ("int8", "2bit"):
        return torch.bfloat16
    return None
