"""Runs the search of DT-FM (github.com/DS3Lab/DT-FM, MIT) for the sizes and links of a request.

    python dtfm_process.py FOLDER REQUEST.json ANSWER.json

This is a separate process. It imports DT-FM's code unchanged. FOLDER has its scheduler.py and
config.py. The search makes 4,900 trials, or as many as the CPU seconds of the request ("limit")
allow.
"""

import json
import random
import sys
import time
from pathlib import Path

TRIALS = 4900  # the default of DT-FM
PROBE = 2  # trials of a first, short search, to find how long a trial takes
SEARCH_SHARE = (
    0.7  # part of the limit that the trials may take; the rest is for the start and the probe
)


def main():
    """Search with DT-FM's genetic algorithm, and write the plan as JSON.

    The command line is FOLDER (DT-FM's code) REQUEST.json ANSWER.json. The request has DT-FM's
    global variables, and "limit": CPU seconds of the search. Plan: "stages", each the numbers of
    its GPUs.
    """
    folder = sys.argv[1]
    request = json.loads(Path(sys.argv[2]).read_text())
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
    scheduler.peer_delay = numpy.array(request["delay_ms"])
    scheduler.peer_bandwidth = numpy.array(request["rate_gbps"])
    random.seed(0)
    numpy.random.seed(0)
    devices = list(range(scheduler.num_devices))

    def searched(trials):
        """Run DT-FM's genetic search with a number of trials (its argument is named "trails").

        Returns:
            DT-FM's result and the CPU seconds. The result begins with the last population (each
            individual lists all GPUs, stage after stage) and its costs.
        """
        begin = time.process_time()
        outcome = scheduler.GCMA(devices, population_size=100, trails=trials, mode="default")
        return outcome, time.process_time() - begin

    _, probe_s = searched(PROBE)
    trial_s = probe_s / PROBE
    affordable = int(SEARCH_SHARE * request["limit"] / trial_s)
    trials = max(PROBE, min(TRIALS, affordable))
    (population, costs, _), seconds = searched(trials)
    # An individual of the population lists all GPUs, stage after stage.
    best = population[int(numpy.argmin(costs))]
    size = scheduler.partition_size  # GPUs of a stage
    groups = []
    for start in range(0, len(best), size):
        groups.append([int(gpu) for gpu in best[start : start + size]])
    data = float(scheduler.compute_data_parallel_cost(groups))
    # `path`: order of the stages. `match`: pairs of GPUs of neighbouring stages.
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
