"""Compression of the pseudo-gradients that jobs exchange (setting `compress`).

    bf16, int8   the codecs of the hierarchical all-reduce (runtime/compress.py)
    2bit         two bits for each element: its sign, and whether it has the smaller or the larger of its
                 chunk's two magnitudes. The magnitudes of a chunk of 512 elements minimize its squared error
                 (Lloyd and Max): each is the mean of the elements nearer to it. Rounding errors are added to
                 the next pseudo-gradient of the same elements (error feedback), as in MuLoCo (arXiv
                 2505.23725), which also quantizes to 2 bits

Format of 2bit: for each chunk two magnitudes (bfloat16), then four codes a byte: 12.9 % of bf16's bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from holmes_ext.join.settings import OuterSettings
from holmes_ext.runtime.compress import Codec as OuterCodec
from holmes_ext.runtime.compress import codec

#: Codes of two bits in one byte.
_CODES_PER_BYTE = 4
#: Bytes of the two magnitudes of a chunk.
_MAGNITUDE_BYTES = 4
#: Steps of Lloyd's algorithm; it starts from the mean magnitude. More steps reduce the squared error by
#: less than 0.5 % (normal and Laplace distributions).
_LLOYD_STEPS = 5


class _Block(NamedTuple):
    """Shape of a matrix of chunks of equal length that are encoded together.

    The codec divides a tensor into chunks of 512 elements. Each chunk is sent as two magnitudes
    (bfloat16) and a 2-bit code per element. A tensor has at most two blocks: the full chunks, and
    a shorter chunk at the end.
    """

    chunks: int  # number of chunks
    #: Elements of a chunk, with zeros at its end up to a multiple of 4: four codes fill a byte.
    width: int
    chunk_bytes: int  # bytes of an encoded chunk

    @property
    def encoded_bytes(self) -> int:
        return self.chunks * self.chunk_bytes


class TwoBits(OuterCodec):
    """Codec with two bits for each element: its sign, and the choice between two magnitudes.

    A chunk of 512 consecutive elements shares the two magnitudes. A tensor is encoded as its full
    chunks, then a shorter chunk at its end.
    """

    feedback = True
    saves_above = 0
    chunk = 512  # elements that share two magnitudes

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return an empty uint8 tensor with room for the encoding of a flat tensor."""
        size = sum(block.encoded_bytes for block in self._blocks(like.numel()))
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    def encode(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Encode `x` plus `residual`, and replace `residual` by the new rounding errors.

        That is error feedback: the rounding errors of an encoding are added to the next tensor. The
        tensor is encoded in chunks of 512 elements; the last chunk may be shorter. Chunks of equal
        length form a block and are encoded together. So there are at most two blocks: all full
        chunks, and the shorter last chunk.

        Args:
            x: Flat tensor.
            residual: Rounding errors of the previous encoding of the same elements, updated in
                place. None: no error feedback.

        Returns:
            The bytes to send, uint8.
        """
        wanted = x.float() if residual is None else torch.add(x, residual)
        wire = self.buffer(x)  # empty uint8 tensor of the encoded size; it is filled here and sent
        element = 0  # index in `wanted` of the block's first element
        byte = 0  # index in `wire` of the encoded block's first byte
        for block in self._blocks(x.numel()):
            part = wanted[element : element + block.chunks * block.width]
            # A shorter chunk is filled up with zeros, so that its last byte has four codes.
            zeros = block.chunks * block.width - part.numel()
            rows = pad(part, (0, zeros)).view(block.chunks, block.width)
            encoded = wire[byte : byte + block.encoded_bytes]  # a view
            encoded.view(block.chunks, -1).copy_(_encoded(rows))
            element += part.numel()
            byte += block.encoded_bytes
        if residual is not None:  # without NaNs: they would stay in it for ever
            torch.sub(wanted, self.decode(wire, wanted), out=residual).nan_to_num_(0.0, 0.0, 0.0)
        return wire

    def decode(self, wire: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the flat tensor that was encoded, with the size and dtype of `like`."""
        decoded = []
        byte = 0  # index in `wire` of the encoded block's first byte
        for block in self._blocks(like.numel()):
            rows = wire[byte : byte + block.encoded_bytes].view(block.chunks, -1)
            decoded.append(_decoded(rows).view(-1))
            byte += block.encoded_bytes
        if not decoded:
            return torch.empty_like(like)
        return torch.cat(decoded)[: like.numel()].to(like.dtype)

    def _blocks(self, numel: int) -> list[_Block]:
        """Return a tensor's blocks (chunks of equal length): the full chunks, then a shorter chunk.

        An empty block is left out. `numel` is the tensor's number of elements.
        """
        full, remainder = divmod(numel, self.chunk)
        blocks = []
        if full:
            blocks.append(self._block(full, self.chunk))
        if remainder:
            blocks.append(self._block(1, remainder))
        return blocks

    def _block(self, chunks: int, elements: int) -> _Block:
        """Return number, padded length and encoded bytes of chunks that have equal lengths.

        A chunk is encoded as two magnitudes, and a 2-bit code for each element: its sign, and which
        of the two magnitudes it gets. Four codes fill a byte, so a chunk's length is padded to a
        multiple of 4.

        Args:
            chunks: Number of chunks.
            elements: Elements of each chunk, before padding.
        """
        codes_bytes = -(-elements // _CODES_PER_BYTE)  # of a chunk, rounded up
        return _Block(
            chunks,
            width=codes_bytes * _CODES_PER_BYTE,
            chunk_bytes=_MAGNITUDE_BYTES + codes_bytes,
        )


def _encoded(rows: torch.Tensor) -> torch.Tensor:
    """Quantize each row to a sign and one of two magnitudes per element; return the packed rows.

    A packed row is two magnitudes (bfloat16, the smaller first), then four 2-bit codes per byte. A
    code's low bit selects the magnitude, its high bit is the sign. Lloyd's algorithm finds the
    magnitudes: the mean absolute values above and below a threshold, which lies midway between
    them.

    Args:
        rows: Signed values, [chunks, width]; `width` is a multiple of 4.

    Returns:
        uint8 [chunks, bytes of a packed row].
    """
    width = rows.shape[1]
    magnitudes = rows.abs()
    threshold = magnitudes.mean(1, keepdim=True)
    for _ in range(_LLOYD_STEPS):
        is_large = magnitudes > threshold
        large_count = is_large.sum(1, keepdim=True)
        small_count = width - large_count
        high = (magnitudes * is_large).sum(1, keepdim=True) / large_count.clamp(min=1)
        low = (magnitudes * ~is_large).sum(1, keepdim=True) / small_count.clamp(min=1)
        threshold = (low + high) / 2
    # An encoded chunk: its two magnitudes, then the codes of its elements.
    header = torch.cat([low, high], 1).bfloat16().view(torch.uint8)
    return torch.cat([header, _codes(rows, is_large)], 1)


def _codes(values: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """Return the two-bit codes of chunks, four in a byte: uint8 [chunks, width / 4].

    Args:
        values: [chunks, width]; a code's higher bit is the sign.
        large: bool [chunks, width]: whether the element has the larger magnitude; a code's lower bit.
    """
    codes = (2 * (values < 0) + large).to(torch.uint8).view(len(values), -1, _CODES_PER_BYTE)
    return codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6


def _decoded(wire: torch.Tensor) -> torch.Tensor:
    """Return the values of rows that _encoded() has quantized to two magnitudes and signs.

    Args:
        wire: Packed rows, uint8 [chunks, bytes]: two bfloat16 magnitudes, then four 2-bit codes per
            byte. Any bytes are valid.

    Returns:
        float32 [chunks, width], where `width` is four elements per code byte.
    """
    header = wire[:, :_MAGNITUDE_BYTES].clone(memory_format=torch.contiguous_format)
    magnitudes = header.view(torch.bfloat16).float()  # [chunks, 2]: the smaller, the larger
    packed = wire[:, _MAGNITUDE_BYTES:]
    # Four codes in a byte. A code's lower bit selects the magnitude, its higher bit is the sign.
    codes_of_byte = [packed >> shift & 3 for shift in (0, 2, 4, 6)]
    codes = torch.stack(codes_of_byte, 2).view(len(wire), -1).long()
    is_large = codes & 1
    signs = 1 - 2 * (codes >> 1)
    return magnitudes.gather(1, is_large) * signs


def codec_of(settings: OuterSettings) -> OuterCodec:
    """Return the codec that the setting `compress` names."""
    if settings.compress == "2bit":
        return TwoBits()
    return codec(settings.compress)


def residual_dtype(settings: OuterSettings) -> torch.dtype | None:
    """Return the dtype of the rounding errors that the codec adds to its next input; None: it adds none."""
    if settings.compress in ("int8", "2bit"):
        return torch.bfloat16
    return None
