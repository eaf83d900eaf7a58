"""Tests that the workflows of GitHub Actions give away as little as possible.

A tag of an action can be moved to other code by whoever takes over its repository; a commit cannot. The
token of a workflow may only read, and is not left in the checkout, where the code under test could use it.
"""

import re
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[1] / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.y*ml"))
#: An action by its full commit, and the version of that commit as a comment: "owner/name@0123... # v1.2.3".
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def steps_of(workflow):
    """Return all steps of all jobs of a workflow."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_there_are_workflows():
    assert WORKFLOWS


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
class TestEachWorkflow:
    def test_every_action_is_pinned_by_its_commit(self, workflow):
        uses = re.findall(r"\buses:\s*(.*)", workflow.read_text())
        assert len(uses) == sum("uses" in step for step in steps_of(workflow))
        assert [action for action in uses if not PINNED.fullmatch(action)] == []

    def test_the_token_may_only_read(self, workflow):
        content = yaml.safe_load(workflow.read_text())
        assert content["permissions"] == {"contents": "read"}
        assert [name for name, job in content["jobs"].items() if "permissions" in job] == []

    def test_the_token_is_not_left_in_the_checkout(self, workflow):
        checkouts = [step for step in steps_of(workflow) if "checkout@" in step.get("uses", "")]
        assert checkouts
        for step in checkouts:
            assert step["with"]["persist-credentials"] is False

    def test_a_pull_request_of_a_stranger_gets_no_secrets(self, workflow):
        """The event pull_request_target would run with the token and the secrets of this repository."""
        assert "pull_request_target" not in workflow.read_text()

    def test_no_command_contains_a_text_that_strangers_choose(self, workflow):
        """An expression in `run:` becomes shell code; a pull request's title or branch must not."""
        commands = [step["run"] for step in steps_of(workflow) if "run" in step]
        assert [command for command in commands if "${{" in command] == []


def test_all_workflows_use_the_same_commit_of_an_action():
    commits = {}
    for workflow in WORKFLOWS:
        for action, commit in re.findall(r"\buses:\s*([^@]+)@(\S+)", workflow.read_text()):
            commits.setdefault(action, set()).add(commit)
    assert commits and all(len(values) == 1 for values in commits.values()), commits
