"""What travels between jobs: pseudo-gradients in fewer bytes.

    bf16, int8   as between the levels of a reduction (runtime/reduce/compress.py)
    2bit         of every element its sign, and which of two magnitudes it has: the two with the least squared
                 error in its chunk of 512 (Lloyd and Max), each the mean of the elements that are nearer to
                 it. What the rounding left out is added to the next pseudo-gradient of the same elements
                 (error feedback), as in MuLoCo (arXiv 2505.23725), which quantizes to 2 bits too
    topk         SparseLoCo (arXiv 2508.15706): of each chunk of 4096 elements the `topk` largest, 12 bits for
                 the place of each and 2 for its sign and which of two magnitudes it has; what is left out is
                 added to the next pseudo-gradient of the same elements, less 5 % each time

The wire: of each chunk two magnitudes (bfloat16; topk: the means of the smaller and of the larger half), the
places of topk, the codes. Of bf16's bytes 2bit has 12.9 %, topk with 88 of 4096 1.9 %.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from holmes_ext.join.settings import OuterSettings
from holmes_ext.runtime.reduce.compress import Codec as OuterCodec
from holmes_ext.runtime.reduce.compress import codec

CHUNK = 4096
#: What of topk's residual is added the next time.
DECAY = 0.95
#: Places are packed two in three bytes, codes four in one.
_TOGETHER = 4
_MAGNITUDE_BYTES = 4
#: Steps of Lloyd's algorithm, from the mean magnitude on; more take less than 0.5 % of the squared error away
#: (normal, Laplace).
_LLOYD_STEPS = 5


class _ByChunks(OuterCodec):
    """Each chunk in bytes of its own: the whole chunks, and a shorter one at the end."""

    feedback, above = True, 0
    chunk = CHUNK

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        size = sum(chunks * each for chunks, _, _, each in self._blocks(like.numel()))
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        wanted = x.float() if residual is None else torch.add(x, residual, alpha=self.decay)
        wire, at, place = self.buffer(x), 0, 0
        for chunks, keep, width, each in self._blocks(x.numel()):
            part = wanted[at : at + chunks * width]
            rows = F.pad(part, (0, chunks * width - part.numel())).view(chunks, width)
            wire[place : place + chunks * each].view(chunks, each).copy_(self._packed(rows, keep))
            at, place = at + part.numel(), place + chunks * each
        if residual is not None:
            torch.sub(wanted, self.decode(wire, wanted), out=residual).nan_to_num_(0.0, 0.0, 0.0)
        return wire

    def decode(self, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        made, place = [], 0
        for chunks, keep, _, each in self._blocks(like.numel()):
            rows = wire[place : place + chunks * each].view(chunks, each)
            made.append(self._unpacked(rows, keep).view(-1))
            place += chunks * each
        return torch.cat(made)[: like.numel()].to(like.dtype) if made else torch.empty_like(like)

    def _blocks(self, numel: int) -> list[tuple[int, int, int, int]]:
        """(chunks, then _sizes() of one of them), of chunks that are as long."""
        whole, rest = divmod(numel, self.chunk)
        return [(chunks, *self._sizes(count)) for chunks, count in ((whole, self.chunk), (1, rest))
                if chunks * count]  # fmt: skip

    def _sizes(self, count: int) -> tuple[int, int, int]:
        """Of a chunk of `count` elements: those that are kept (a multiple of 4), its width with zeros at its
        end, its bytes."""
        raise NotImplementedError

    def _packed(self, rows: torch.Tensor, keep: int) -> torch.Tensor:
        """[chunks, bytes] of [chunks, width]."""
        raise NotImplementedError

    def _unpacked(self, wire: torch.Tensor, keep: int) -> torch.Tensor:
        """[chunks, width] of [chunks, bytes]."""
        raise NotImplementedError


class TwoBits(_ByChunks):
    chunk = 512

    def _sizes(self, count: int) -> tuple[int, int, int]:
        keep = -(-count // _TOGETHER) * _TOGETHER
        return keep, keep, _MAGNITUDE_BYTES + keep // _TOGETHER

    def _packed(self, rows: torch.Tensor, keep: int) -> torch.Tensor:
        sizes = rows.abs()
        middle = sizes.mean(1, keepdim=True)
        for _ in range(_LLOYD_STEPS):
            large = sizes > middle
            count = large.sum(1, keepdim=True)
            high = (sizes * large).sum(1, keepdim=True) / count.clamp(min=1)
            low = (sizes * ~large).sum(1, keepdim=True) / (keep - count).clamp(min=1)
            middle = (low + high) / 2
        return torch.cat([_magnitudes(torch.cat([low, high], 1)), _codes(rows, large)], 1)

    def _unpacked(self, wire: torch.Tensor, keep: int) -> torch.Tensor:
        return _values(wire, _MAGNITUDE_BYTES)


class TopK(_ByChunks):
    """keep: elements of each chunk, a multiple of 4; of a shorter one at the end as many in proportion."""

    decay = DECAY

    def __init__(self, keep: int):
        self.keep = keep

    def _sizes(self, count: int) -> tuple[int, int, int]:
        keep = max(_TOGETHER, -(-self.keep * count // CHUNK // _TOGETHER) * _TOGETHER)
        return keep, CHUNK, _MAGNITUDE_BYTES + keep * 3 // 2 + keep // _TOGETHER

    def _packed(self, rows: torch.Tensor, keep: int) -> torch.Tensor:
        places = rows.abs().topk(keep, dim=1).indices.sort(dim=1).values
        values = rows.gather(1, places)
        sizes, order = values.abs().sort(dim=1)
        halves = torch.stack([sizes[:, : keep // 2].mean(1), sizes[:, keep // 2 :].mean(1)], 1)
        large = torch.zeros_like(values, dtype=torch.bool).scatter_(1, order[:, keep // 2 :], True)
        first, second = places[:, 0::2], places[:, 1::2]
        three = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 2).to(torch.uint8)
        return torch.cat([_magnitudes(halves), three.view(len(rows), -1), _codes(values, large)], 1)

    def _unpacked(self, wire: torch.Tensor, keep: int) -> torch.Tensor:
        """Places that are not there cannot be told."""
        end = _MAGNITUDE_BYTES + keep * 3 // 2
        three = wire[:, _MAGNITUDE_BYTES:end].reshape(len(wire), -1, 3).long()
        first = three[..., 0] | (three[..., 1] & 15) << 8
        second = three[..., 1] >> 4 | three[..., 2] << 4
        places = torch.stack([first, second], 2).view(len(wire), -1)
        return torch.zeros(len(wire), CHUNK, device=wire.device).scatter_(1, places, _values(wire, end))


def _magnitudes(halves: torch.Tensor) -> torch.Tensor:
    """Their bytes: [chunks, 4] of [chunks, 2]."""
    return halves.bfloat16().view(torch.uint8)


def _codes(values: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """Signs, and which magnitude: [chunks, count / 4] of [chunks, count]."""
    codes = (2 * (values < 0) + large).to(torch.uint8).view(len(values), -1, 4)
    return codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6


def _values(wire: torch.Tensor, end: int) -> torch.Tensor:
    """[chunks, count] of [chunks, bytes]: magnitudes at its begin, codes from byte `end` on."""
    halves = wire[:, :_MAGNITUDE_BYTES].clone(memory_format=torch.contiguous_format)
    halves = halves.view(torch.bfloat16).float()
    codes = torch.stack([wire[:, end:] >> shift & 3 for shift in (0, 2, 4, 6)], 2).view(len(wire), -1).long()
    return halves.gather(1, codes & 1) * (1 - 2 * (codes >> 1))


def codec_of(settings: OuterSettings) -> OuterCodec:
    if settings.compress == "topk":
        return TopK(settings.topk)
    return TwoBits() if settings.compress == "2bit" else codec(settings.compress)


def residual_dtype(settings: OuterSettings) -> torch.dtype | None:
    """Of what the codec leaves out and adds the next time; None where it keeps nothing."""
    known = {"int8": torch.bfloat16, "2bit": torch.bfloat16, "topk": torch.float32}
    return known.get(settings.compress)
