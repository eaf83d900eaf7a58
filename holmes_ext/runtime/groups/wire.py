"""What of an activation, or its gradient, travels between clusters: this tensor rank's part, in fewer bits.

Without sequence parallelism every tensor rank of a stage has the same tensor to send. Its rows (all
dimensions but the last) are cut among them, and the tensor ranks that receive gather the whole, inside their
node:

    stage s        rank 0 [ a b ]      rank 1 [ a b ]
                          | a               | b           across: 1 / t of the bytes each, rows
    stage s + 1    rank 0 [ a . ] ---- rank 1 [ . b ]     padded to a multiple of t
                          [ a b ]             [ a b ]     inside: all-gather over the tensor group

Order and freedom from deadlock: the gather is one more collective of the pass that the message is for. It is
launched where the schedule waits for the message, by the thread and on the stream that launch the pass; all
tensor ranks of a stage run one schedule, so their tensor group sees the same collectives in the same order.
What a gather waits for are the messages to the other tensor ranks of its stage. Those were sent after the
same pass of the stage before, by ranks that needed each other's collectives to get through that pass: no
rank's message is further in the schedule than another's, and the order of all passes has no circle
(patches/deepspeed/stage_links.py).

Under NCCL (read, not run): waiting for the message lets the current stream wait for the pair's; the gather is
enqueued behind it on the tensor group's own stream, and the current stream waits for that, as for every
collective of a tensor group. It is done in place (a rank's part is a view of the whole), so nothing is
allocated on one stream and used on another, but for padding.

Narrower (--holmes-compress-activations): "bf16" rounds float32 to bfloat16; "int8" to 1/127 of the
largest magnitude of the
row, whose float32 scale travels before the rows. A NaN or infinity makes its row NaN. What a rank receives it
decodes before the gather, so all tensor ranks go on with the same numbers.

A part that is sent is a view with a TensorImpl of its own: a framework that frees its output by `.data =`
(megatron-core's deallocate_pipeline_outputs) leaves the storage to the view, which the operation holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.compress import Int8, codec

if TYPE_CHECKING:
    from holmes_ext.runtime.compress import Codec

#: What to do once a message is there, on the stream of the pass that needs it.
Finish = Callable[[], None]


@dataclass(frozen=True)
class Wire:
    """To and from one neighbour. parts: tensor ranks that share a tensor out, this one being the `place`-th
    of `group`; compression: "off", "bf16" or "int8"; stage link: for errors."""

    parts: int = 1
    place: int = 0
    group: Any = None
    compression: str = "off"
    stage_link: str = "the stage link"

    def outgoing(self, tensor: Any) -> Any:
        """What is to be sent of `tensor`, contiguous, and kept until then. HolmesError: it cannot be
        narrowed."""
        compression = self._compression_of(tensor)
        if self.parts == 1 and compression == "off":
            return tensor.detach()
        rows = _rows(tensor.detach().contiguous())
        each = -(-len(rows) // self.parts)
        mine = rows[self.place * each : (self.place + 1) * each]
        if len(mine) < each:
            padded = rows.new_zeros(each, rows.shape[1])
            padded[: len(mine)] = mine
            mine = padded
        return (
            mine if compression == "off" else _codec(compression, mine).encode(mine.view(-1), None)
        )

    def incoming(self, tensor: Any) -> tuple[Any, Finish]:
        """For `tensor`, contiguous, to be filled: what to receive into, and what to do when that has come."""
        import torch.distributed as dist

        compression = self._compression_of(tensor)
        if self.parts == 1 and compression == "off":
            return tensor.detach(), lambda: None
        rows = _rows(tensor.detach())
        each = -(-len(rows) // self.parts)
        whole = (
            rows
            if len(rows) == each * self.parts
            else rows.new_empty(each * self.parts, rows.shape[1])
        )
        mine = whole[self.place * each : (self.place + 1) * each]
        flat, code = mine.view(-1), _codec(compression, mine)
        sent = mine if compression == "off" else code.buffer(flat)

        def finish() -> None:
            if sent is not mine:
                flat.copy_(code.decode(sent, flat))
            if self.parts > 1:
                dist.all_gather_into_tensor(whole, mine, group=self.group)
            if whole is not rows:
                rows.copy_(whole[: len(rows)])

        return sent, finish

    def _compression_of(self, tensor: Any) -> str:
        """Not where it is as compression already, nor of a single number (DeepSpeed's first message)."""
        import torch

        if tensor.dim() == 0:
            return "off"
        dtype = tensor.dtype
        if self.compression == "int8" and dtype not in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ):
            sends = f"{self.stage_link} sends {str(dtype).removeprefix('torch.')}"
            way_out = (
                "only float32, bf16 and fp16 can be rounded to int8, use "
                "--holmes-compress-activations bf16 or off"
            )
            raise HolmesError(f"--holmes-compress-activations int8: {sends}; {way_out}")
        return "off" if self.compression == "bf16" and dtype != torch.float32 else self.compression


PLAIN = Wire()


def _rows(tensor: Any) -> Any:
    return tensor.view(-1, tensor.shape[-1])


def _codec(compression: str, rows: Any) -> Codec:
    """Of `rows` [rows, row's length], flat."""
    return Int8(rows.shape[1]) if compression == "int8" else codec(compression)
