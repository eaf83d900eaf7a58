"""Encodes messages between pipeline stages: each tensor-parallel rank sends a compressed slice.

Without sequence parallelism, all tensor-parallel ranks of a stage have the same activation (or gradient) to
send. Each of them sends a slice of its rows (all dimensions but the last), and the receiving ranks gather the
slices over their tensor group, inside their node:

    stage s        rank 0 [ a b ]      rank 1 [ a b ]
                          | a               | b           between clusters: each rank sends 1/t of the rows,
    stage s + 1    rank 0 [ a . ] ---- rank 1 [ . b ]     padded to a multiple of t (t: tensor-parallel ranks)
                          [ a b ]             [ a b ]     inside the node: all-gather over the tensor group

A message:

    1  outgoing()   takes this rank's slice of a tensor and compresses it; the caller sends the result
    2  incoming()   returns the buffer for the caller's receive, and a function `finish`
    3  finish()     decompresses the buffer, and gathers the slices of the other tensor ranks

Invariant: finish() runs where the schedule waits for the message, by the thread and on the stream of the
pass that needs it. All tensor ranks of a stage run the same schedule, so the collectives of their tensor
group have the same order on all ranks.

No rank waits for ever: the gather waits for the messages to the other tensor ranks of its stage. The ranks of
the previous stage sent these after the same pass, and needed each other's collectives in it. So no rank's
message is later in the schedule than another rank's, and the order of all passes has no cycle
(patches/deepspeed/stage_links.py).

With NCCL (from reading its code, not run): after the wait for a message, the current stream waits for the
stream of the pair's group. The gather is enqueued on the stream of the tensor group, and the current stream
waits for it, as for any collective. The gather is in place (the slice is a view of the whole tensor), so
except for padding no memory is allocated on a stream and used on another.

Compression (--holmes-compress-activations): "bf16" rounds float32 to bfloat16. "int8" rounds to 1/127 of the
largest magnitude of a row; the row's float32 scale is sent, too. NaN or infinity makes its whole row NaN.
Slices are decompressed before the gather, so all tensor ranks continue with the same numbers.

A slice that is sent is a view with a TensorImpl of its own. If a framework frees its output by `.data =`
(megatron-core's deallocate_pipeline_outputs), the view keeps the storage alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.compress import Int8, codec

if TYPE_CHECKING:
    from holmes_ext.runtime.compress import Codec

#: Completes a tensor once its message has arrived, on the stream of the pass that needs it.
Finish = Callable[[], None]


@dataclass(frozen=True)
class Wire:
    """Encoding of the messages to and from a neighbouring pipeline stage."""

    slices: int = 1  # tensor-parallel ranks that send a slice each; 1 to send whole tensors
    slice_index: int = 0  # index of this rank's slice
    group: Any = None  # process group of the tensor-parallel ranks
    compression: str = "off"  # "off", "bf16" or "int8"
    stage_link: str = "the stage link"  # for error messages

    def outgoing(self, tensor: Any) -> Any:
        """Return the message that this rank sends of a tensor: its slice of the rows, compressed.

        With a single slice and no compression, the message is the whole tensor. The caller must keep the
        message until it has been sent.

        Args:
            tensor: The activation or gradient, equal on all tensor-parallel ranks of the stage.

        Raises:
            HolmesError: the tensor's dtype cannot be compressed.
        """
        compression = self._compression_of(tensor)
        if self.slices == 1 and compression == "off":
            return tensor.detach()
        rows = _as_matrix(tensor.detach().contiguous())
        slice_rows = self._rows_per_slice(rows)
        own_slice = self._own_slice(rows)
        if len(own_slice) < slice_rows:  # the last slice; all slices must have the same size
            padded = rows.new_zeros(slice_rows, rows.shape[1])
            padded[: len(own_slice)] = own_slice
            own_slice = padded
        if compression == "off":
            return own_slice
        slice_codec = _codec_for(compression, own_slice)
        return slice_codec.encode(own_slice.view(-1), residual=None)  # no error feedback

    def incoming(self, tensor: Any) -> tuple[Any, Finish]:
        """Prepare to receive a tensor whose slices arrive compressed, on several tensor-parallel ranks.

        Args:
            tensor: Contiguous tensor that is filled.

        Returns:
            The buffer that must receive the message, and a function to call when it has arrived. The
            function decodes the message, gathers the slices of the other tensor-parallel ranks, and fills
            `tensor`.

        Raises:
            HolmesError: the tensor's dtype cannot be compressed.
        """
        import torch.distributed as dist

        compression = self._compression_of(tensor)
        if self.slices == 1 and compression == "off":
            return tensor.detach(), _do_nothing
        rows = _as_matrix(tensor.detach())
        padded_length = self._rows_per_slice(rows) * self.slices
        if len(rows) == padded_length:
            gathered = rows
        else:  # the slices of all ranks together are longer than the tensor
            gathered = rows.new_empty(padded_length, rows.shape[1])
        own_slice = self._own_slice(gathered)
        flat_slice = own_slice.view(-1)
        slice_codec = _codec_for(compression, own_slice)
        buffer = own_slice if compression == "off" else slice_codec.buffer(flat_slice)

        def finish() -> None:
            if buffer is not own_slice:
                flat_slice.copy_(slice_codec.decode(buffer, like=flat_slice))
            if self.slices > 1:
                dist.all_gather_into_tensor(gathered, own_slice, group=self.group)
            if gathered is not rows:
                rows.copy_(gathered[: len(rows)])

        return buffer, finish

    def _rows_per_slice(self, rows: Any) -> int:
        """Return the number of rows of each slice: all rows, divided among the slices and rounded up."""
        return -(-len(rows) // self.slices)

    def _own_slice(self, rows: Any) -> Any:
        """Return the slice of a tensor's rows that this tensor-parallel rank sends or receives (a view).

        All slices have as many rows, but the last ones may be shorter or empty.
        """
        slice_rows = self._rows_per_slice(rows)
        return rows[self.slice_index * slice_rows : (self.slice_index + 1) * slice_rows]

    def _compression_of(self, tensor: Any) -> str:
        """Return the compression that applies to a tensor: "off", "bf16" or "int8".

        Scalars (such as DeepSpeed's first message) are not compressed, and "bf16" applies to float32 only.

        Raises:
            HolmesError: the dtype cannot be rounded to int8.
        """
        import torch

        if tensor.dim() == 0:
            return "off"
        if self.compression == "bf16" and tensor.dtype != torch.float32:
            return "off"
        is_float = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if self.compression == "int8" and not is_float:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise HolmesError(
                f"--holmes-compress-activations int8: {self.stage_link} sends {dtype}; "
                "only float32, bf16 and fp16 can be rounded to int8, use "
                "--holmes-compress-activations bf16 or off"
            )
        return self.compression


#: Encoding that sends whole tensors unchanged.
PLAIN = Wire()


def _do_nothing() -> None:
    pass


def _as_matrix(tensor: Any) -> Any:
    """Return a tensor as a matrix (a view): the last dimension stays, the others are flattened."""
    return tensor.view(-1, tensor.shape[-1])


def _codec_for(compression: str, rows: Any) -> Codec:
    """Return the codec for a matrix that is sent flat; int8 has a scale for each row."""
    if compression == "int8":
        return Int8(rows.shape[1])
    return codec(compression)
