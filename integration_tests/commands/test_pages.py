"""Tests that the commands on the pages of docs/ still print the lines that the pages show.

The commands run in the lab, which emulates a cluster with network namespaces on this machine. Numbers and
names differ from run to run. So only the kind of each line is compared: its first three words without digits.
"""

import importlib.util
import os
import re

import pytest
from holmes_lab.rights import program

from holmes_ext.errors import HolmesError
from integration_tests.jobs import ROOT, full

SPEC = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)
PAGES = [page for page in generate.pages() if "<!-- lab -->" in page.read_text()]
#: Python packages that a page needs, besides those of .venv.
NEEDED_PACKAGES = {"trainer.md": ("transformers",), "lightning.md": ("lightning", "transformers")}
#: Programs that `holmes lab run --launcher NAME` needs, besides those of every lab.
NEEDED_PROGRAMS = {
    "srun": ("slurmctld", "slurmd", "munged", "srun", "sinfo"),
    "mpirun": ("mpirun", "sshd", "ssh", "ssh-keygen"),
}


def skip_without_requirements(page):
    """Skip the test if this machine cannot run the commands of `page`.

    The test is skipped if a Python package or a launcher's program is missing, or if a launcher such as srun
    needs root and this process is not root.
    """
    for package in NEEDED_PACKAGES.get(page.name, ()):
        pytest.importorskip(package)
    for launcher in re.findall(r"--launcher (\w+)", page.read_text()):
        if launcher not in NEEDED_PROGRAMS:
            continue
        if os.getuid() != 0:
            pytest.skip(f"--launcher {launcher} needs root")
        for name in NEEDED_PROGRAMS[launcher]:
            try:
                program(name)  # raises HolmesError if it is not installed
            except HolmesError as error:
                pytest.skip(str(error))


def kinds(text):
    """Return the kind of each line of the text: its first three words, with `#` for numbers and paths.

    Times, ranks and nodes differ from run to run, so lines of the same kind count as equal.
    """
    text = re.sub(r"\d{8}-\d{6}-\w+|\S+/\S+", "#", text)  # names of runs, paths
    lines = (
        re.sub(r"\d[\d.]*", "#", line).split()
        for line in text.splitlines()
        if line.strip(" \u2500")
    )
    kept = (words[:3] for words in lines if words[0] != "..." and words[:2] != ["too", "narrow"])
    return {" ".join(re.sub(r"^[ab]#$", "NODE", word) for word in words) for words in kept}


@full
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_jobs_print_what_the_page_shows(page, tmp_path):
    """For each line that the page shows below a command, the command prints a line of the same kind."""
    skip_without_requirements(page)
    # Runs the page's commands on emulated nodes.
    seen = list(generate.in_lab(page.read_text(), tmp_path))
    assert seen
    for command, shown, printed in seen:
        missing = kinds(shown) - kinds(printed)
        assert shown.strip() and not missing, (command, missing, printed)


@pytest.mark.parametrize("launcher", NEEDED_PROGRAMS)
def test_a_page_is_skipped_without_the_programs_of_its_launcher(launcher, tmp_path, monkeypatch):
    """A page with the flag `--launcher srun` or `mpirun` is tested if the launcher's programs are installed.

    Otherwise the test is skipped, and the reason names the missing apt package.
    """
    page = tmp_path / "page.md"
    page.write_text(
        f"    holmes lab run --cluster c.toml --launcher {launcher} -- python train.py\n"
    )
    monkeypatch.setattr("os.getuid", lambda: 0)

    # All programs are installed: the test is not skipped.
    monkeypatch.setattr("holmes_lab.rights.shutil.which", lambda name, path: f"/usr/bin/{name}")
    skip_without_requirements(page)

    # No program is installed.
    monkeypatch.setattr("holmes_lab.rights.shutil.which", lambda name, path: None)
    with pytest.raises(pytest.skip.Exception, match="is missing; apt-get install"):
        skip_without_requirements(page)


def test_what_no_longer_fits_is_seen():
    """The comparison above can fail."""
    now = "step 9: loss 5.1, 0.2 s\n  data   across, ethernet 4  1.6 MB\n 3  b1  b  1.3\n"
    page = (
        "step 6: loss 4.5187, 1.683 s\ndata  across, ethernet  4\n1  b1  b  1.2\n...\ntoo narrow for: "
        "sent\n"
    )
    assert kinds(page) <= kinds(now)
    assert not kinds("step 6: accuracy 4.5\n") <= kinds(now)
