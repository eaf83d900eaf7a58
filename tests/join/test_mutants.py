"""What integration_tests/joined/mutants.py breaks is still there: each of its texts once, in its file."""

from integration_tests.joined.mutants import MUTANTS, PACKAGE, ROOT


def test_each_mutant_has_one_place_to_break():
    texts = {
        file: (ROOT / PACKAGE / file).read_text() for file in {mutant.file for mutant in MUTANTS}
    }
    assert not [mutant.name for mutant in MUTANTS if texts[mutant.file].count(mutant.old) != 1]


def test_what_a_mutant_runs_is_there():
    files = {file for mutant in MUTANTS for file in mutant.tests.split(" -k ")[0].split()}
    assert not [file for file in sorted(files) if not (ROOT / file).exists()]
