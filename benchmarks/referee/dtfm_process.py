"""Runs the search of DT-FM (github.com/DS3Lab/DT-FM, MIT) for the sizes and links of a request.

    python dtfm_process.py FOLDER REQUEST.json ANSWER.json

This is a process of its own, which imports DT-FM's code unchanged. FOLDER has its scheduler.py and
config.py. The search makes 4,900 trials, or as many as --limit has time for.
"""

import json
import random
import sys
import time
from pathlib import Path

TRIALS = 4900  # the default of DT-FM
PROBE = 2  # first trials, which show how long a trial takes
PART = 0.7  # part of the limit that the trials may take


def main():
    """Search, and write the plan as JSON."""
    folder, request = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    sys.path[:1] = [folder]
    import numpy
    import scheduler

    for name in (
        "num_devices",
        "way",
        "partition_size",
        "send_gradient_size",
        "send_activation_size",
    ):
        setattr(scheduler, name, request[name])
    scheduler.peer_delay, scheduler.peer_bandwidth = map(
        numpy.array, (request["delay_ms"], request["rate_gbps"])
    )
    random.seed(0)
    numpy.random.seed(0)
    devices = list(range(scheduler.num_devices))

    def searched(trials):
        begin = time.process_time()
        outcome = scheduler.GCMA(devices, population_size=100, trails=trials, mode="default")
        return outcome, time.process_time() - begin

    _, probe_s = searched(PROBE)
    trials = max(PROBE, min(TRIALS, int(PART * request["limit"] / probe_s * PROBE)))
    (population, costs, _), seconds = searched(trials)
    best, size = population[int(numpy.argmin(costs))], scheduler.partition_size
    groups = [[int(gpu) for gpu in best[at : at + size]] for at in range(0, len(best), size)]
    data = float(scheduler.compute_data_parallel_cost(groups))
    pipeline, path, match = scheduler.compute_pipeline_parallel_cost(groups)
    stages = scheduler.get_pipelines(groups, path, match).tolist()
    answer = {
        "stages": stages,
        "cost": data + 2 * float(pipeline),
        "trials": trials,
        "seconds": seconds + probe_s,
    }
    Path(sys.argv[3]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
