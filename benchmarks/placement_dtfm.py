"""Runs the search of DT-FM (github.com/DS3Lab/DT-FM, MIT) for one of its cases, and prints a line of JSON.

    python benchmarks/placement_dtfm.py FOLDER CASE SEED [TRIALS]

This is a separate process. It imports DT-FM's scheduler.py unchanged. FOLDER has scheduler.py
and config.py of its scheduler/heuristic_evolutionary_solver. CASE is 0 to 4, as in its config.py.
TRIALS is 4900 unless it is given. DT-FM's own seeds have no effect (`np.random.seed = ...` replaces
a function), so they are set here.

With `check` in place of SEED, groups are read from stdin (a list of 8 lists of GPUs), and their cost by
DT-FM's objective is printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import time

DTFM_TRIALS = 4900  # as in DT-FM's scheduler.py


def main() -> None:
    """Search, or compute the cost of given groups, and print the result as JSON.

    DT-FM is a published planner. It assigns GPUs to pipeline stages. The command line is FOLDER
    CASE SEED [TRIALS] for a search. With "check" in place of SEED, no search is made, and the
    groups (GPUs of each stage) are read from stdin. `config` and `scheduler` are modules of DT-FM
    in FOLDER. DT-FM chose the names of their functions and parameters (`trails` means trials).
    """
    folder = sys.argv[1]
    case = int(sys.argv[2])
    sys.path.insert(0, folder)
    import config
    import numpy
    import scheduler

    # config has one function simulate_CASE_NAME() for each case, which makes the case's network.
    simulate = [
        value
        for name, value in sorted(vars(config).items())
        if name.startswith(f"simulate_{case}_")
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        # The function returns the latencies and rates between GPUs, and the region of each GPU. It
        # also prints, which is suppressed here.
        scheduler.peer_delay, scheduler.peer_bandwidth, scheduler.regions = simulate[0]()
    if sys.argv[3] == "check":
        groups = json.loads(sys.stdin.read())
        answer = {}
    else:
        random.seed(int(sys.argv[3]))
        numpy.random.seed(int(sys.argv[3]))
        trials = int(sys.argv[4]) if len(sys.argv) > 4 else DTFM_TRIALS
        begin_s = time.monotonic()
        begin_cpu_s = time.process_time()
        # The genetic algorithm of DT-FM. An individual lists all GPUs, stage after stage.
        population, costs, _ = scheduler.GCMA(
            list(range(scheduler.num_devices)), population_size=100, trails=trials, mode="default"
        )
        answer = {
            "seconds": time.monotonic() - begin_s,
            "cpu_seconds": time.process_time() - begin_cpu_s,
            "trials": trials,
        }
        best = population[int(numpy.argmin(costs))]
        size = scheduler.partition_size  # GPUs of a stage
        groups = []
        for start in range(0, len(best), size):
            groups.append([int(gpu) for gpu in best[start : start + size]])
    data = float(scheduler.compute_data_parallel_cost(groups))
    # `path`: the order of the stages in the pipeline.
    pipeline, path, _ = scheduler.compute_pipeline_parallel_cost(groups)
    cost = {"cost": data + 2 * float(pipeline), "data": data, "pipeline": 2 * float(pipeline)}
    print(json.dumps({**answer, **cost, "groups": [groups[stage] for stage in path]}))


if __name__ == "__main__":
    main()
