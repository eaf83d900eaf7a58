"""Tests SECURITY.md: each statement names a test that exists, or says that no test shows it.

The file also tests a statement on which many others rest: nothing that holmes_ext reads becomes code.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "SECURITY.md"
#: The headings of tables whose last column names tests.
SHOWN_BY = "shown by"
NO_TEST = "-"
#: Roles of the trust model: each has a section of its own.
ROLES = (
    "Outsider",
    "Somebody on the path",
    "Member",
    "Coordinator",
    "Another user of a host",
    "Extension package",
    "Author of a file",
    "A cluster's own network",
)
#: Functions that make code, or objects of any class, of data.
MAKES_CODE = {"eval", "exec", "compile", "__import__"}
UNPICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle"}


def statements() -> list[tuple[str, str]]:
    """Return the rows of all tables with tests: the statement, and the cell that names its tests."""
    rows = []
    names_tests = False
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            names_tests = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[-1] == SHOWN_BY:
            names_tests = True
        elif names_tests and set(line) - set("|- "):  # not the line below the heading
            rows.append((cells[0], cells[-1]))
    return rows


@cache
def names_of_tests(path: Path) -> set[str]:
    """Return the tests of a file, as pytest names them: "test_a" or "TestB::test_c"."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            members = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            names |= {f"{node.name}::{each.name}" for each in members}
    return {name for name in names if name.rpartition("::")[2].startswith("test_")}


def test_the_page_has_statements_about_every_role():
    text = PAGE.read_text()
    assert [role for role in ROLES if f"\n### {role}\n" not in text] == []
    assert [role for role in ROLES if f"\n| {role.lower()} |" not in text] == []
    assert len(statements()) > len(ROLES)


@pytest.mark.parametrize("statement, tests", statements())
def test_every_statement_names_a_test_that_exists(statement, tests):
    if tests == NO_TEST:
        return
    for test in tests.split(", "):
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert name in names_of_tests(ROOT / file), test


def makes_code(call: ast.Call) -> bool:
    """Return whether a call makes code of data: eval(), a shell, or torch.load() of any object."""
    function = call.func
    keywords = {each.arg: each.value for each in call.keywords}
    if isinstance(function, ast.Name):
        return function.id in MAKES_CODE
    if not isinstance(function, ast.Attribute):
        return False
    module = function.value.id if isinstance(function.value, ast.Name) else ""
    if (module, function.attr) == ("torch", "load"):
        weights_only = keywords.get("weights_only")
        return not (isinstance(weights_only, ast.Constant) and weights_only.value is True)
    if (module, function.attr) in (("os", "system"), ("os", "popen"), ("yaml", "load")):
        return True
    shell = keywords.get("shell")
    return isinstance(shell, ast.Constant) and bool(shell.value)


def test_no_module_makes_code_of_data():
    found = []
    for folder in ("holmes_ext", "patches"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = []
                if isinstance(node, ast.Import):
                    modules = [each.name for each in node.names]
                elif isinstance(node, ast.ImportFrom):
                    modules = [node.module or ""]
                bad_import = any(name.partition(".")[0] in UNPICKLES for name in modules)
                if bad_import or isinstance(node, ast.Call) and makes_code(node):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize(
    "code, bad",
    [
        ("eval(text)", True),
        ("torch.load(file)", True),
        ("torch.load(file, weights_only=False)", True),
        ("torch.load(file, weights_only=True)", False),
        ("subprocess.run(text, shell=True)", True),
        ("subprocess.run(words)", False),
        ("os.system(text)", True),
        ("re.compile(text)", False),
    ],
)
def test_what_makes_code_is_recognized(code, bad):
    (call,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert makes_code(call) is bad
