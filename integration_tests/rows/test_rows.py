"""Every row of README's table "your job", end to end: stock and holmes train, save, resume and report alike.

A job is launched four times at most, and all tests of it share these runs:

    stock                5 steps, a checkpoint after step 3
    holmes               the same, with what README's table adds, and with telemetry
    holmes from stock    steps 4 and 5 from stock's checkpoint
    stock from holmes    steps 4 and 5 from holmes's checkpoint
"""

import pytest
from carriers import ON_GPUS
from summary import readme_rows

from integration_tests.jobs import ROOT
from integration_tests.rows.job import SAVED, STEPS, Checkpoints, Runs, StartInLab, patched
from integration_tests.rows.jobs import JOBS
from integration_tests.rows.launchers import StartByLauncher

#: Patches without which no job runs as planned.
ALWAYS = {"ranks", "nics", "telemetry"}
TORCHRUN = next(job for job in JOBS if job.launcher == "torchrun")


def each(jobs):
    """Parametrize a test by jobs, each with the mark of what README's table calls it."""
    marked = [
        pytest.param(job, id=job.name, marks=[pytest.mark.row(job.part), pytest.mark.timeout(1800)])
        for job in jobs
    ]
    return pytest.mark.parametrize("runs", marked, indirect=True)


@pytest.fixture(scope="module")
def launchers(tmp_path_factory):
    with StartByLauncher(tmp_path_factory.mktemp("launchers")) as start:
        yield start


@pytest.fixture(scope="module")
def runs_of_jobs():
    """The runs of each job by its name."""
    return {}


@pytest.fixture
def runs(request, runs_of_jobs, tmp_path_factory):
    """The runs of a job, which all tests share. Each is made when a test first needs it."""

    def runs_of(job):
        if job.name not in runs_of_jobs:
            if job.launcher:
                start = request.getfixturevalue("launchers")
            else:
                start = StartInLab(request.getfixturevalue("two_clusters"))
            # srun and mpirun start no script that wants torchrun's variables without holmes.
            stock_of = runs_of(TORCHRUN) if job.launcher and job is not TORCHRUN else None
            folder = tmp_path_factory.mktemp("runs")
            runs_of_jobs[job.name] = Runs(job, start, folder, ON_GPUS, stock_of)
        return runs_of_jobs[job.name]

    request.param.skip_without_needs()
    if request.param.launcher and ON_GPUS:
        pytest.skip("the lab's launchers start jobs on gloo; their rows are tested there")
    return runs_of(request.param)


def assert_same(losses, expected, tolerance):
    assert len(losses) == len(expected)
    assert max(abs(a - b) for a, b in zip(losses, expected)) <= tolerance, (losses, expected)


@each(JOBS)
def test_losses_are_stocks(runs):
    stock = runs.stock.losses
    assert len(stock) == STEPS and stock[-1] < stock[0]
    assert not runs.stock.holmes_lines
    assert_same(runs.holmes.losses, stock, runs.job.tolerance)


@each([job for job in JOBS if isinstance(job.checkpoints, Checkpoints)])
def test_checkpoints_pass_between_stock_and_holmes(runs):
    """A resumed run has the losses of the run that was not stopped."""
    expected = runs.losses_after_saving
    assert len(expected) == STEPS - SAVED
    assert_same(runs.holmes_from_stock.losses, expected, runs.job.tolerance)
    assert_same(runs.stock_from_holmes.losses, expected, runs.job.tolerance)
    assert runs.holmes_from_stock.holmes_lines and not runs.stock_from_holmes.holmes_lines


@each(JOBS)
def test_all_is_as_planned_and_no_feature_is_off(runs):
    resumes = isinstance(runs.job.checkpoints, Checkpoints)
    for run in [runs.holmes, *([runs.holmes_from_stock] if resumes else [])]:
        assert "2 clusters: ib (" in run.text
        for trouble in ("not as planned", "not patched:", "is off:"):
            assert trouble not in run.text, run.holmes_lines
        assert patched(run) >= ALWAYS | runs.job.features
    assert runs.figures["done"]["differences"] == []


@each(JOBS)
def test_the_report_names_ranks_groups_and_stages(runs):
    figures, nodes = runs.figures, runs.start.nodes
    assert figures["world"] == len(nodes) and figures["notes"] == []
    clusters = {"a": "ib", "b": "roce"}
    ranks = [(row["rank"], row["node"], row["cluster"]) for row in figures["ranks"]]
    assert ranks == [(rank, node, clusters[node[0]]) for rank, node in enumerate(nodes)]
    groups = {(row["kind"], row["where"], row["fabric"]) for row in figures["rows"]}
    assert groups >= {(group.kind, group.where, group.fabric) for group in runs.job.groups}
    stages = {stage for stage, *_ in figures["done"]["reductions"]}
    assert stages == (set(range(runs.job.stages)) if runs.job.names_reductions else set())
    if runs.job.stages > 1:  # holmes runs the pipeline's messages
        assert len(figures["done"]["in_flight"]) == runs.job.stages
    for _, node, cluster in ranks:
        assert any(line.split()[1:3] == [node, cluster] for line in runs.report.splitlines())


def test_jobs_are_those_of_readmes_table():
    entries = {entry for row in readme_rows((ROOT / "README.md").read_text()) for entry in row}
    assert {job.part for job in JOBS} == entries
