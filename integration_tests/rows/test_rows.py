"""Trains a job for each framework and launcher that holmes supports, and compares it with stock.

Stock is the same job without holmes (the torch plugin of this repository). run.md's table "your job"
lists the supported frameworks and launchers. All tests of a job share these launches:

    stock                trains steps 1 to 5 without holmes, and saves a checkpoint after step 3
    holmes               trains and saves like stock, but under holmes
    holmes_from_stock    trains steps 4 and 5 under holmes, from the checkpoint of stock
    stock_from_holmes    trains steps 4 and 5 without holmes, from the checkpoint of holmes
"""

import pytest
from carriers import ON_GPUS
from summary import readme_rows

from integration_tests.jobs import FULL, ROOT, full
from integration_tests.rows.job import SAVED_STEP, STEPS, Runs, StartInLab, patched_features
from integration_tests.rows.jobs import JOBS
from integration_tests.rows.launchers import StartByLauncher

JOB_TIMEOUT_S = 1800  # for all runs that a test starts
#: Features that holmes patches in every job.
FEATURES_OF_EVERY_JOB = {"ranks", "nics", "telemetry"}
#: Parts of a line in which holmes says that something does not work as planned.
TROUBLES = ("not as planned", "not patched:", "is off:")
#: The report's name of the cluster of a node, by the first letter of the node's name.
CLUSTER_OF = {"a": "ib", "b": "roce"}
TORCHRUN_JOB = next(job for job in JOBS if job.launcher == "torchrun")


#: Entries of run.md's table that every run of the tests trains. These are the jobs with pipeline stages that
#: cross clusters, which is what holmes is for, and DDP as the simplest job.
TRAINED_IN_EACH_RUN = {
    "Megatron-LM's pretrain_gpt.py",
    "Megatron-DeepSpeed's pretrain_gpt.py",
    "DeepSpeed's pipeline engine",
    "megatron-core",
    "DDP",
}
JOBS_THAT_TAKE_TURNS = [job for job in JOBS if job.entry not in TRAINED_IN_EACH_RUN]


def marks_of_job(job):
    """Return the marks of all tests of a job: in which runs of the tests it is trained.

    A job takes up to two minutes. Those that are not in TRAINED_IN_EACH_RUN take turns: a run of the tests
    trains one of three. All tests of a job belong together, because they share its launches.
    """
    if job.entry in TRAINED_IN_EACH_RUN:
        return [pytest.mark.each_landing]
    turn = [other.name for other in JOBS_THAT_TAKE_TURNS].index(job.name)
    return [full(turn=turn, share=3)]


#: Entries of run.md's table with checkpoints that every run of the tests exchanges. These are the jobs with
#: pipeline stages, which holmes changes, and DDP as the simplest job. `make nightly` exchanges the
#: checkpoints of all jobs.
EXCHANGED = {"DeepSpeed's pipeline engine", "megatron-core", "DDP"}
#: The same for one in four runs of the tests: jobs with pipeline stages that take a minute or more.
SOMETIMES_EXCHANGED = {
    "Megatron-DeepSpeed's pretrain_gpt.py",
    "Megatron-LM's pretrain_gpt.py",
}


def exchanges_checkpoints(job):
    """Return whether this run of the tests exchanges checkpoints of a job between stock and holmes."""
    return bool(job.checkpoints) and (FULL or job.entry in EXCHANGED)


def marks_of_exchange(job):
    """Return the marks of the test that exchanges checkpoints of a job: which runs leave it out."""
    if job.entry in EXCHANGED:
        return []
    if job.entry in SOMETIMES_EXCHANGED:
        return [full(share=4)]
    return [full]


def for_each(jobs, marks_of=lambda job: []):
    """Return a decorator that runs a test once for each job.

    The test receives the job's launches from the fixture `runs`.

    Args:
        jobs: The jobs.
        marks_of: Returns further marks for the test of a job.
    """
    parameters = []
    for job in jobs:
        # The mark names the job's row in run.md's table. tests/summary.py prints the results by row.
        marks = [pytest.mark.row(job.entry), pytest.mark.timeout(JOB_TIMEOUT_S)]
        marks += marks_of_job(job) + marks_of(job)
        parameters.append(pytest.param(job, id=job.name, marks=marks))
    return pytest.mark.parametrize("runs", parameters, indirect=True)


@pytest.fixture(scope="module")
def launchers(tmp_path_factory):
    with StartByLauncher(tmp_path_factory.mktemp("launchers")) as start:
        yield start


@pytest.fixture(scope="module")
def runs_by_job_name():
    return {}  # the fixture `runs` adds the launches of a job when a test first needs them


@pytest.fixture
def runs(request, runs_by_job_name, tmp_path_factory):
    """Return the launches of the job that is the test's parameter, with and without holmes.

    All tests of a job share one `Runs`, which launches the job when a test reads a result.
    """

    def runs_of(job):
        if job.name in runs_by_job_name:
            return runs_by_job_name[job.name]
        if job.launcher:  # such as srun
            start = request.getfixturevalue("launchers")
        else:  # the lab, which emulates the nodes, starts the processes
            start = StartInLab(request.getfixturevalue("two_clusters"))
        # The script reads torchrun's environment variables, which srun and mpirun do not set. Without
        # holmes, only torchrun can start it: all launchers are compared with that run.
        stock_of = None
        if job.launcher and job is not TORCHRUN_JOB:
            stock_of = runs_of(TORCHRUN_JOB)
        runs_by_job_name[job.name] = Runs(
            job=job,
            start=start,
            folder=tmp_path_factory.mktemp("runs"),
            on_gpus=ON_GPUS,
            stock_of=stock_of,
        )
        return runs_by_job_name[job.name]

    job_of_test = request.param
    job_of_test.skip_if_not_installed()
    if job_of_test.launcher and ON_GPUS:
        pytest.skip("the lab's launchers start jobs on gloo; their rows are tested there")
    return runs_of(job_of_test)


def assert_close(losses, expected_losses, tolerance):
    assert len(losses) == len(expected_losses)
    differences = [abs(loss - expected) for loss, expected in zip(losses, expected_losses)]
    assert max(differences) <= tolerance, (losses, expected_losses)


@for_each(JOBS)
def test_losses_are_stocks(runs):
    """Under the plugin holmes, a job has the same loss in every step as without holmes ("stock")."""
    stock_losses = runs.stock.losses
    assert len(stock_losses) == STEPS
    assert stock_losses[-1] < stock_losses[0]  # the model learns
    assert not runs.stock.holmes_lines
    assert_close(runs.holmes.losses, stock_losses, runs.job.tolerance)


@for_each([job for job in JOBS if job.checkpoints], marks_of_exchange)
def test_checkpoints_pass_between_stock_and_holmes(runs):
    """A job under the plugin holmes resumes from a checkpoint that it saved without holmes, and vice versa.

    Both resumed runs have the losses of a run that was not interrupted.
    """
    expected_losses = runs.losses_after_saving  # of stock
    assert len(expected_losses) == STEPS - SAVED_STEP
    assert_close(runs.holmes_from_stock.losses, expected_losses, runs.job.tolerance)
    assert_close(runs.stock_from_holmes.losses, expected_losses, runs.job.tolerance)
    assert runs.holmes_from_stock.holmes_lines
    assert not runs.stock_from_holmes.holmes_lines


@for_each(JOBS)
def test_all_is_as_planned_and_no_feature_is_off(runs):
    """The plugin holmes finds both clusters, patches all that the job needs, and prints no warning."""
    runs_with_holmes = [runs.holmes]
    if exchanges_checkpoints(runs.job):
        runs_with_holmes.append(runs.holmes_from_stock)
    for run in runs_with_holmes:
        assert "2 clusters: ib (" in run.text  # printed at the start; the other cluster is "roce"
        for trouble in TROUBLES:  # beginnings of warnings
            assert trouble not in run.text, run.holmes_lines
        assert patched_features(run) >= FEATURES_OF_EVERY_JOB | runs.job.features
    # The summary of `holmes report` lists what the job did otherwise than planned.
    assert runs.report_json["done"]["differences"] == []


@for_each(JOBS)
def test_the_report_names_ranks_groups_and_stages(runs):
    """`holmes report` lists the node of each rank, the process groups and the pipeline stages.

    The command summarizes a finished job, as text or as JSON. Both are checked.
    """
    report = runs.report_json
    nodes = runs.start.nodes  # node of each rank
    assert report["world"] == len(nodes)
    assert report["notes"] == []  # nothing is missing in the records of the job

    reported_ranks = [(row["rank"], row["node"], row["cluster"]) for row in report["ranks"]]
    expected_ranks = [(rank, node, CLUSTER_OF[node[0]]) for rank, node in enumerate(nodes)]
    assert reported_ranks == expected_ranks
    for _, node, cluster in expected_ranks:
        # The text has a line for each rank, with the node and the cluster in columns 1 and 2.
        assert any(line.split()[1:3] == [node, cluster] for line in runs.report.splitlines())

    # "rows" has the process groups: for example a "data" group "inside" a cluster over "roce".
    reported_groups = {(row["kind"], row["where"], row["fabric"]) for row in report["rows"]}
    assert reported_groups >= {(group.kind, group.where, group.fabric) for group in runs.job.groups}

    # Each item begins with the number of a stage whose gradients holmes reduced.
    stages_with_reductions = {stage for stage, *_ in report["done"]["reductions"]}
    if runs.job.reports_reductions:
        assert stages_with_reductions == set(range(runs.job.pipeline_stages))
    else:
        assert stages_with_reductions == set()
    if runs.job.pipeline_stages > 1:
        # One number for each stage: its micro-batches whose backward pass is still to come.
        assert len(report["done"]["in_flight"]) == runs.job.pipeline_stages


def test_jobs_are_those_of_readmes_table():
    """run.md's table "your job" has the same entries (frameworks and launchers) as JOBS."""
    rows = readme_rows((ROOT / "docs/run.md").read_text())
    entries = {entry for row in rows for entry in row}
    assert {job.entry for job in JOBS} == entries
