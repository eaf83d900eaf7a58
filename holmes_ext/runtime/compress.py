"""Codecs that shrink tensors before they cross a slow network, such as a link between clusters.

Hierarchical all-reduces use them for the gradients between clusters, and stage links for activations.

    codec   bytes per element      rounding
    bf16    2                      to bfloat16
    int8    1, and a float32       to 1/127 of the largest magnitude in a block of 256 elements
            scale for each block

With int8, the rounding error is added to the same elements in the next step (error feedback: Seide et al.
2014). This keeps SGD's rate of convergence (Karimireddy et al. 2019, arXiv 1901.09847).

All ranks get identical bits: decoding depends only on the bytes on the wire, and the sender goes on with
its own decoded tensor, too. NaN and infinity are not hidden: bf16 keeps them, int8 turns their whole
block into NaN. Neither gets into the residuals (the rounding errors that the next step adds).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holmes_ext.errors import HolmesError

if TYPE_CHECKING:
    import torch

#: Elements that share a scale.
BLOCK = 256
_FLOAT32_BYTES = 4
_INT8_MAX = 127


class Codec:
    """Identity codec, and the interface of all codecs for flat tensors.

    The sender calls wire = encode(x, residual), the receiver decode(wire, like), with `like` a tensor of x's
    length, type and device. The elements of `like` are neither read nor changed.
    """

    #: Bytes on the wire for each byte of a float32 tensor.
    share = 1.0
    #: Whether encode() adds a residual to its input and updates it.
    feedback = False
    #: Largest element size, in bytes, that the codec does not shrink. No float has more than 8 bytes.
    saves_above = 8

    def applies(self, dtype: torch.dtype) -> bool:
        """Return whether this compression makes tensors of type `dtype` smaller."""
        return dtype.is_floating_point and dtype.itemsize > self.saves_above

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized tensor to receive an encoded tensor of the size and type of `like`."""
        return like.new_empty(like.shape)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compress a flat tensor: return the tensor to send in its place.

        Args:
            x: Flat tensor.
            residual: Rounding errors of the step before, float32, of x's length. They are added to `x`, and
                replaced by the new rounding errors. None: there is no error feedback.
        """
        return x

    def decode(self, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Decompress a received tensor, to the length and type of `like`. Elements of `like` are not used."""
        return wire


class Bf16(Codec):
    """Codec that rounds to bfloat16."""

    share = 0.5
    saves_above = 2

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized bfloat16 tensor of the length of `like`."""
        import torch

        return like.new_empty(like.numel(), dtype=torch.bfloat16)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Compress a flat tensor by rounding it to bfloat16. `residual` is not used."""
        return x.bfloat16()

    def decode(self, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Convert a received bfloat16 tensor to the type of `like`."""
        return wire.to(like.dtype)


class Int8(Codec):
    """Codec that rounds each block to 255 levels between plus and minus its largest magnitude.

    The wire is a uint8 tensor: the float32 scales of all blocks, then an int8 for each element, then
    zeros up to a multiple of 4 bytes.
    """

    share = (1 + _FLOAT32_BYTES / BLOCK) / _FLOAT32_BYTES
    feedback = True
    saves_above = 0

    def __init__(self, block_size: int = BLOCK):
        """Create a codec for blocks of `block_size` elements. The elements of a block share a scale."""
        self.block_size = block_size

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialized uint8 tensor with room for the encoded `like`: its scales and levels."""
        import torch

        blocks = _divide_up(like.numel(), self.block_size)
        words = blocks + _divide_up(like.numel(), _FLOAT32_BYTES)  # of 4 bytes
        return like.new_empty(_FLOAT32_BYTES * words, dtype=torch.uint8)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Round `x` plus `residual` to 8 bits per element: return scales and levels, update the residual.

        The scale of a block is its largest magnitude / 127, and a level is an element / scale, rounded.

        Args:
            x: Flat tensor.
            residual: Rounding errors of the step before, float32, of x's length; replaced by the new ones.
                None: there is no error feedback.
        """
        import torch

        numel = x.numel()
        if residual is None:
            target = x.float()  # the values to encode
        else:
            target = torch.add(x, residual)
        blocks = self._in_blocks(target)
        scales = blocks.abs().amax(1).div_(_INT8_MAX)
        divisors = scales.masked_fill(scales == 0, 1.0)[:, None]  # a block of zeros is divided by 1

        # A block with NaN or infinity gets a scale that is not finite, so that decode() makes it NaN.
        levels = (blocks / divisors).round_().nan_to_num_(0.0, 0.0, 0.0)

        wire = self.buffer(x)  # bytes: scales, levels, padding
        scales_end = _FLOAT32_BYTES * len(scales)
        levels_end = scales_end + numel
        wire[:scales_end].view(torch.float32).copy_(scales)
        wire[scales_end:levels_end].view(torch.int8).copy_(levels.view(-1)[:numel])
        if levels_end < len(wire):
            wire[levels_end:].zero_()
        if residual is not None:
            decoded = levels.mul_(scales[:, None]).view(-1)[:numel]
            torch.sub(target, decoded, out=residual).nan_to_num_(0.0, 0.0, 0.0)
        return wire

    def decode(self, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Decompress a received int8 message: each element is its level times the scale of its block.

        The result has the length and type of `like`. Elements of `like` are not used.
        """
        import torch

        numel = like.numel()
        scales_end = _FLOAT32_BYTES * _divide_up(numel, self.block_size)
        scales = wire[:scales_end].view(torch.float32)
        levels = wire[scales_end : scales_end + numel].view(torch.int8)
        values = self._in_blocks(levels.float()).mul_(scales[:, None])
        return values.view(-1)[:numel].to(like.dtype)

    def _in_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor as [blocks, elements of a block], padded with zeros if necessary."""
        import torch

        padding = -flat.numel() % self.block_size
        if padding:
            flat = torch.cat((flat, flat.new_zeros(padding)))
        return flat.view(-1, self.block_size)


def _divide_up(dividend: int, divisor: int) -> int:
    """Return `dividend` divided by `divisor`, rounded up."""
    return -(-dividend // divisor)


PLAIN = Codec()
_CODECS = {"off": PLAIN, "bf16": Bf16(), "int8": Int8()}


def codec(kind: str) -> Codec:
    """Return the codec with the name that flags and plans use: "off", "bf16" or "int8".

    Raises:
        HolmesError: There is no such codec.
    """
    if kind not in _CODECS:
        raise HolmesError(f"compress: {kind!r} is not one of {', '.join(_CODECS)}")
    return _CODECS[kind]


#: Rounding errors (residuals) of a tensor, by compressed message: (tag of the message in the
#: all-reduce, offset or number of the part of the tensor that it carries) -> residual.
ResidualMap = dict[tuple[int, int], "torch.Tensor"]


class Residuals:
    """Rounding errors of compression, for all tensors that are reduced in every training step.

    Error feedback adds the errors of one training step to the same elements in the next step. A
    tensor is identified by its Python object, or by an object that stands for it, such as its
    bucket. Its residuals live as long as this object. They have as many float32 elements as this
    rank sends, and are in no checkpoint.
    """

    def __init__(self) -> None:
        """Create a collection without residuals."""
        import torch

        self._of = torch.utils.weak.WeakIdKeyDictionary()

    def of(self, tensor: object) -> ResidualMap:
        """Return the rounding errors of a tensor, by message. Callers add new ones to the result.

        Args:
            tensor: The tensor, or the object that stands for it.
        """
        return self._of.setdefault(tensor, {})


def residual_of(
    residuals: ResidualMap | None, key: tuple[int, int], part: torch.Tensor
) -> torch.Tensor | None:
    """Return the rounding errors of a tensor part that was compressed in the last training step.

    Error feedback adds them to the part before it is compressed again. If the part has not been
    compressed yet, they are zeros, and are stored in `residuals`.

    Args:
        residuals: Key -> rounding errors of the tensor. None: the codec has no error feedback, and
            None is returned.
        key: (tag of the message in the all-reduce, offset or number of the part in the tensor).
        part: Elements that are going to be compressed.

    Returns:
        A flat float32 tensor of the part's length. Codec.encode() replaces its values by the new
        errors.
    """
    if residuals is None:
        return None
    if key not in residuals:
        residuals[key] = part.new_zeros(part.numel()).float()
    return residuals[key]
