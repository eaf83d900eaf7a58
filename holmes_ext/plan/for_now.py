"""Until plan/cost/network.py and plan/cost/buckets.py are there: the present two-level price and bucket rule."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_BYTES = 25 * 2**20
CHUNK_SHARE_BYTES = 512 * 2**10


def bucket_bytes_for(latency_s: float, rate_bps: float, ranks: int, share: float = 0.1) -> int:
    wanted = ranks * (rate_bps / 8) * latency_s * (1 - share) / share
    return int(min(max(wanted, 2**20), 256 * 2**20))


def predict(
    size: int, clusters: Sequence[int], fabric: tuple[float, float], ethernet: tuple[float, float], processes: int = 1, share: float = 1.0
) -> tuple[float, float]:
    ranks, smallest, largest, count = sum(clusters), min(clusters), max(clusters), len(clusters)
    flat = 2 * (ranks - 1) * (ethernet[1] + size * 8 / ranks / ethernet[0])
    chunk = min(size, CHUNK_SHARE_BYTES * smallest)
    bits_inside = processes * (largest - processes) / largest * chunk * 8
    bits_across = share * processes * (count - 1) / count * chunk / smallest * 8
    inside = 2 * (fabric[1] + bits_inside / fabric[0])
    across = 2 * (ethernet[1] + bits_across / ethernet[0])
    return flat, inside + across + (max(1, size / chunk) - 1) * max(inside, across)
