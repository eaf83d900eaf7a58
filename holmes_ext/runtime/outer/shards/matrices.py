"""Matrices of which ranks of a job hold parts (ZeRO, FSDP, a distributed optimizer): gathered inside the job
for the outer step, and each rank keeps its part.

    rank 0 exchanges  [ a        b  ]           gathered  [ a        b    ][ b c     ]   orthogonal: a, b
    rank 1 exchanges               [ b c     ]  gathered  [ a        b    ][ b c     ]   orthogonal:    b, c
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from holmes_ext.runtime.outer.orthogonal import Matrices, Matrix
from holmes_ext.runtime.outer.shards.job_ranks import Replicas
from holmes_ext.runtime.outer.shards.state import Fragment


@dataclass(frozen=True, kw_only=True)
class CutMatrices(Matrices):
    """places: in the whole fragment, of those of which this rank exchanges something. holders: all ranks of
    the position."""

    fragment: Fragment
    holders: Replicas

    needs_others: ClassVar[bool] = True

    def orthogonalize(self, flat: torch.Tensor) -> None:
        row = torch.cat([part.values for part in self.holders.gather(self.fragment, flat)]).cpu()
        super().orthogonalize(row)
        for a, b in self.fragment.ranges:
            flat[self.fragment.places(a, b)] = row[a - self.fragment.start : b - self.fragment.start]


def gather_cut_matrices(
    fragments: Sequence[Fragment], matrices: Sequence[Matrix], holders: Replicas, device: torch.device
) -> None:
    """From now on the outer steps of these fragments are collective over the ranks of the position."""
    for fragment in fragments:
        places = [replace(matrix, start=matrix.start - fragment.start) for matrix in matrices
                  if any(matrix.start < b and a < matrix.stop for a, b in fragment.ranges)]  # fmt: skip
        fragment.matrices = CutMatrices(places=places, device=device, fragment=fragment, holders=holders)
