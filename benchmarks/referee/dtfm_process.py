"""DT-FM's own search (github.com/DS3Lab/DT-FM, MIT), as it is, on a request's sizes and links: a process of
its own.

    python dtfm_process.py FOLDER REQUEST.json ANSWER.json

FOLDER has its scheduler.py and config.py. Its trials are 4,900, or as many as --limit has time for.
"""

import json
import random
import sys
import time
from pathlib import Path

TRIALS, PROBE, PART = 4900, 2, 0.7


def main():
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
