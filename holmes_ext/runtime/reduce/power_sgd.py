"""PowerSGD between clusters only: what the program registers compresses what crosses, and nothing else.

    inside each cluster    the exact average, on its fabric: all its ranks hold the same bits afterwards
    across                 torch's own powerSGD_hook among the ranks in the same place of each cluster: every such group
                           computes the same factors, so all ranks end alike, and error feedback stays in the state

(Vogels et al. 2019, arXiv 1905.13727; torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py.) Until
start_powerSGD_iter buckets are averaged in two levels. gloo: two threads, since the hook waits inside its own
callbacks; CUDA: everything is launched from the caller's thread on a side stream, in the buckets' order, inside before
across. (Not run on GPUs.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.reduce.steps import Steps


class PowerSGD:
    """future = reduce(bucket). clusters: as many global ranks in each; state: a PowerSGDState, whose process_group
    becomes the one across; hook: powerSGD_hook or batched_powerSGD_hook; plain: averages a bucket without compression.
    Construction is collective."""

    def __init__(
        self, clusters: Sequence[Sequence[int]], state: Any, hook: Callable[..., Any], plain: Callable[[Any], Any]
    ):
        inside = next(members for members in clusters if dist.get_rank() in members)
        place = inside.index(dist.get_rank())
        self._state, self._hook, self._plain = state, hook, plain
        self._inside = members_group(inside, "two-level inside")
        state.process_group = members_group([members[place] for members in clusters], "two-level across")
        self._steps = Steps("powersgd", self._average_inside, lambda bucket: hook(state, bucket).wait())
        self._side: Any = None

    def __call__(self, bucket: Any) -> Any:
        if self._state.iter < self._state.start_powerSGD_iter:
            self._state.maybe_increase_iter(bucket)
            return self._plain(bucket)
        if not bucket.buffer().is_cuda:
            return self._steps([bucket]).get_future().then(lambda done: _value(done, bucket.buffer()))
        if self._side is None:
            self._side = torch.cuda.Stream(bucket.buffer().device)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._average_inside(bucket)
            return self._hook(self._state, bucket)

    def close(self) -> None:
        self._steps.close()

    def _average_inside(self, bucket: Any) -> None:
        flat = bucket.buffer()
        dist.all_reduce(flat.div_(self._inside.size()), group=self._inside)


def _value(done: Any, flat: torch.Tensor) -> torch.Tensor:
    done.value()  # raises what went wrong
    return flat
