"""Codecs for what crosses the slow network: a hierarchical reduction's middle step, a pipeline's stage link.

    bf16   2 bytes an element: rounded to bfloat16
    int8   1 byte an element and a float32 scale for each 256: rounded to 1/127 of the block's
           largest magnitude, and what the rounding left out is added to the same elements in the
           next step (error feedback: Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847,
           show that it keeps SGD's rate of convergence)

Both are functions of their input alone, and everybody, the sender too, goes on with what was decoded: all
ranks have the same bits. A NaN or infinity makes its block NaN (int8) or stays (bf16): neither is hidden, nor
kept in residuals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holmes_ext.errors import HolmesError

if TYPE_CHECKING:
    import torch

#: Elements that share a scale.
BLOCK = 256


class Codec:
    """wire = encode(x, residual), x' = decode(wire, like=x): flat tensors of one device. This one: x as it
    is. share: bytes on the wire for each of float32; feedback: encode() updates a residual, which it
    has added; above: bytes of an element from which on it saves any."""

    share, feedback, above = 1.0, False, 8

    def applies(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize > self.above

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(like.shape)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return x

    def decode(self, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return wire


class Bf16(Codec):
    share, above = 0.5, 2

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        import torch

        return like.new_empty(like.numel(), dtype=torch.bfloat16)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return x.bfloat16()

    def decode(self, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return wire.to(like.dtype)


class Int8(Codec):
    """The wire, uint8: the blocks' scales, then the elements, to a multiple of 4 bytes."""

    share, feedback, above = (1 + 4 / BLOCK) / 4, True, 0

    def __init__(self, block: int = BLOCK):
        self.block = block

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        import torch

        blocks = -(-like.numel() // self.block)
        return like.new_empty(4 * (blocks + -(-like.numel() // 4)), dtype=torch.uint8)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        import torch

        wanted = x.float() if residual is None else torch.add(x, residual)
        blocks = self._in_blocks(wanted)
        scales = blocks.abs().amax(1).div_(127)
        steps = (
            (blocks / scales.masked_fill(scales == 0, 1.0)[:, None])
            .round_()
            .nan_to_num_(0.0, 0.0, 0.0)
        )
        wire = self.buffer(x)
        cut = 4 * len(scales)
        wire[:cut].view(torch.float32).copy_(scales)
        wire[cut : cut + x.numel()].view(torch.int8).copy_(steps.view(-1)[: x.numel()])
        if cut + x.numel() < len(wire):
            wire[cut + x.numel() :].zero_()
        if residual is not None:
            decoded = steps.mul_(scales[:, None]).view(-1)[: x.numel()]
            torch.sub(wanted, decoded, out=residual).nan_to_num_(0.0, 0.0, 0.0)
        return wire

    def decode(self, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        import torch

        numel = like.numel()
        cut = 4 * -(-numel // self.block)
        scales, steps = wire[:cut].view(torch.float32), wire[cut : cut + numel].view(torch.int8)
        values = self._in_blocks(steps.float()).mul_(scales[:, None])
        return values.view(-1)[:numel].to(like.dtype)

    def _in_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        """[blocks, block]; zeros at the end where they are needed."""
        import torch

        if rest := -flat.numel() % self.block:
            flat = torch.cat((flat, flat.new_zeros(rest)))
        return flat.view(-1, self.block)


PLAIN = Codec()
_CODECS = {"off": PLAIN, "bf16": Bf16(), "int8": Int8()}


def codec(kind: str) -> Codec:
    if kind not in _CODECS:
        raise HolmesError(f"compress: {kind!r} is not one of {', '.join(_CODECS)}")
    return _CODECS[kind]


#: (step, where in the tensor the part begins) -> residual.
ResidualMap = dict[tuple[int, int], "torch.Tensor"]


class Residuals:
    """What int8 has left out so far, for each part of each tensor that is reduced step after step.

    A tensor is known by its identity (or its stand-in's), and residuals live as long. They are as many floats
    as this rank sends across, and in no checkpoint.
    """

    def __init__(self) -> None:
        import torch

        self._of = torch.utils.weak.WeakIdKeyDictionary()

    def of(self, whole: object) -> ResidualMap:
        return self._of.setdefault(whole, {})


def residual_of(
    known: ResidualMap | None, key: tuple[int, int], part: torch.Tensor
) -> torch.Tensor | None:
    """The residual of `part` among those of its tensor: zeros at first; None without any."""
    if known is not None and key not in known:
        known[key] = part.new_zeros(part.numel()).float()
    return known[key] if known is not None else None
