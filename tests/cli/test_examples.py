"""`holmes examples` copies the files that the documentation's commands name.

An installed holmes_ext has these files too (tests/test_packaging.py).
"""

import filecmp
from pathlib import Path

from holmes_ext.cli.main import main
from holmes_ext.samples import examples


def test_they_are_copied_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["examples"]) == 0 and "clusters, deepspeed_pipeline" in capsys.readouterr().out
    compared = filecmp.dircmp(examples(), "examples", ignore=["__pycache__"])
    assert not compared.left_only and not compared.right_only and not compared.diff_files
    assert main(["examples"]) == 2
    assert capsys.readouterr().err == "holmes: examples: examples exists; give another folder\n"
    assert (
        main(["examples", "elsewhere"]) == 0 and Path("elsewhere", "trainer", "train.py").is_file()
    )


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["examples", str(tmp_path / "file" / "below")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "cannot be written" in told
