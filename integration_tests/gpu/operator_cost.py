"""Measures the time of a small operator on an emulated GPU, and on the CPU.

Prints {"cpu": [...], "gpu": [...]}: medians in microseconds by two clocks. The first is the time until all
calls have ended. The second is the CPU time of all threads, which other programs on the machine hardly
change.
"""

import json
import statistics
import time

import torch

CALLS = 2000  # of each run
RUNS = 15
CLOCKS = (time.perf_counter, time.process_time)


def microseconds(device: str) -> list[float]:
    """Return the time of one call of a + b in microseconds, by each clock."""
    a = torch.ones(16, device=device)
    b = torch.ones(16, device=device)
    runs = []
    for _ in range(RUNS):
        begin = [clock() for clock in CLOCKS]
        for _ in range(CALLS):
            a + b
        if device == "cuda":
            torch.cuda.synchronize()
        runs.append([(clock() - first) / CALLS * 1e6 for clock, first in zip(CLOCKS, begin)])
    return [statistics.median(times) for times in zip(*runs[1:])]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"cpu": microseconds("cpu"), "gpu": microseconds("cuda")}), flush=True)
