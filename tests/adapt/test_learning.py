"""A whole job of four ranks that learns: real threads and votes, steps by the simulation."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from learning_job import LearningJob

from holmes_ext.adapt import restart
from holmes_ext.adapt.window import StepWindow
from holmes_ext.options import options_from
from holmes_ext.plan.maker import PlanRequest
from holmes_ext.plan.profile import load_profile
from holmes_ext.runtime.measure.stage import Stage
from holmes_ext.runtime.start.store import left_layers


@pytest.fixture
def job():
    made = []

    def start(*case, **options):
        made.append(LearningJob(case, **options))
        return made[-1]

    yield start
    for one in made:
        one.end()


def test_a_job_learns_follows_a_rate_that_drifts_and_flaps_not(job, tmp_path):
    one = job((3, 3), 0.02, 5)
    one.until(lambda: one.held() != (2, 1))
    assert one.held() == (3, 1)
    one.until(lambda: one.lines)
    assert one.lines[0].startswith("3+1 micro-batches in flight (were 2+1): a step takes ")
    for _ in range(30):
        one.step()
    assert one.held() == (3, 1) and len(one.lines) == 1
    one.case = ((3, 3), 0.02, 2.2)
    one.until(lambda: one.held()[0] > 3)
    plans = [told["plan"] for told in one.documents if "plan" in told]
    assert [plan["in_flight"][0] for plan in plans][:2] == [3, one.held()[0]]
    models = [told for told in one.documents if "model" in told]
    assert models[-1]["stage_links"] == [0]
    (tmp_path / "model.json").write_text(json.dumps(models[0]["model"]))
    assert load_profile(tmp_path / "model.json").stages[0].stage_link_s == pytest.approx(
        8 * 32768 / 5e6, rel=0.1
    )


def test_a_free_stage_link_changes_nothing(job):
    one = job((3, 3), 0.02, 900)
    for _ in range(40):
        one.step()
    assert one.held() == (2, 1) and not one.lines


def test_a_rank_that_becomes_slow_is_told_with_what_a_restart_would_bring(job):
    one = job((3, 3), 0.02, 900)
    for _ in range(10):
        one.step()
    one.slower = 3.0
    one.until(
        lambda: any(
            "a restart with --holmes-partition 5,1 would take" in line for line in one.lines
        )
    )


def elastic(monkeypatch, one, restarts="3"):
    """Start ranks whose launcher is torchrun's agent."""
    for name, value in (("RESTART_COUNT", "0"), ("MAX_RESTARTS", restarts)):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    for rank in one.ranks:
        rank.current.process = replace(rank.current.process, launcher="torchrun", agent_store=True)


def test_a_job_starts_again_with_better_layers_after_its_next_checkpoint(job, monkeypatch):
    monkeypatch.setattr(restart, "ALL_S", 0.01)  # one thread stands for all ranks
    one = job((3, 3), 0.02, 900, restart="auto")
    elastic(monkeypatch, one)
    one.slower = 3.0
    one.until(lambda: one.lines)
    said = "the job starts again after its next checkpoint: a restart with --holmes-partition 5,1 would take"
    assert said in one.lines[0] and len(one.lines) == 1
    for _ in range(3):  # no checkpoint yet
        one.step()
    restart.saved()
    for rank in one.ranks:
        with pytest.raises(SystemExit) as ended:
            rank.begin_step()
        assert ended.value.code == restart.STATUS
    store = one.ranks[0].current.store
    layers, sizes = left_layers(store)
    request = PlanRequest(options_from(restart="auto"))
    options, (line,) = request.start_again(layers, sizes)
    assert options.stage_layers == (5, 1) and request.sizes.pipeline == 2 and "5,1" in line


def test_a_restart_that_nobody_would_do_is_told(job, monkeypatch):
    one = job((3, 3), 0.02, 900, restart="auto")
    elastic(monkeypatch, one, "0")
    one.slower = 3.0
    one.until(lambda: one.lines)
    assert "5,1 would take" in one.lines[0] and "torchrun --max-restarts N does" in one.lines[0]


def test_a_rank_whose_agent_will_not_start_it_again_keeps_the_job_running(job, monkeypatch):
    one = job((3, 3), 0.02, 900, restart="auto")
    elastic(monkeypatch, one)
    one.ranks[3].current.process = replace(one.ranks[3].current.process, agent_store=False)
    one.slower = 3.0
    for _ in range(40):
        one.step()
    assert not one.lines and left_layers(one.ranks[0].current.store) == ("", None)


def test_tell_changes_nothing(job):
    one = job((3, 3), 0.02, 5, adapt="report")
    one.until(lambda: one.lines)
    for _ in range(20):
        one.step()
    assert one.held() == (2, 1) and len(one.lines) == 1
    assert "with 3+1 micro-batches in flight (were 2+1) a step would take" in one.lines[0]


def test_passes_whose_blocks_nobody_tells_are_left_out():
    """A pipeline engine's passes where a reducer began the learning: one stage, which only sums."""
    window = StepWindow(Stage("torch", 0, 1, 1, {}, {0: 0}), SimpleNamespace(rank=0))
    window.step(0.0, 1.0, [], [("forward", 0.0, 0.3), ("backward", 0.3, 0.9)], None)
    assert "forward" not in window.report()
