"""The program behind ``make mutants``: what it changes, what it leaves alone, and whom it takes at its word."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MUTANTS = Path(__file__).parents[1] / "mutants"


@pytest.fixture(scope="module")
def changes():
    """The module that makes the changes, loaded by its path."""
    spec = importlib.util.spec_from_file_location("changes", MUTANTS / "changes.py")
    sys.modules["changes"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["changes"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a < b", {"return None", "a >= b", "a <= b"}),
        ("return a and b", {"return None", "a or b", "b", "a"}),
        ("return not a", {"return None", "a"}),
        ("return a + 3", {"return None", "a - 3", "4", "2"}),
        ("return a * 0.5", {"return None", "a + 0.5", "1.0"}),
        ("return max(a, b)", {"return None", "min(a, b)"}),
        ("return g(a, b)", {"return None", "g(b, a)"}),
        ("return g(a, a)", {"return None"}),
        ("return f(a, key=True)", {"return None", "f(a)", "False"}),
        ("return [x for x in a if x]", {"return None", "for …"}),
        ("return a if b else 0", {"return None", "if True", "if False", "1"}),
        ("self.a = b", {"removed"}),
        ("self.a += 1", {"removed", "self.a -= 1", "2"}),
        ("a.close()", {"removed"}),
        ("raise ValueError('a' + 'b')", {"removed"}),
        ("while a:\n        break", {"if False", "removed"}),
        ("a = b", set()),
        ("warn(a, 1)", set()),
        ("return f'{a + 1}'", {"return None"}),
        ("if cython.compiled:\n        return a + 1", set()),
    ],
)
def test_what_is_tried(changes, body, expected):
    """Each kind of place has its changes, and texts, plain names and the compiled form's branches have none."""
    found = changes.changes_of(f"def function(self, a, b=1 + 1):\n    {body}\n")
    assert expected == {change.text.partition("  →  ")[2] for change in found}


def test_a_change_is_applied_alone(changes):
    """The tree with a change differs from the module's in that place."""
    source = "class C:\n\n    def f(self, a):\n        return a < 1\n"
    (change,) = [change for change in changes.changes_of(source) if change.text.endswith("a >= 1")]
    assert ("C.f", "return a < 1", "a < 1  →  a >= 1") == change.name
    assert source.replace("<", ">=").strip() == ast.unparse(change.applied(ast.parse(source)))


def test_import_time_code_is_left_alone(changes):
    """What runs at import is not in a function, and cannot be put in place while pytest runs."""
    assert [] == changes.changes_of("A = 1 + 1\nclass C:\n    b: int = 3\n")


@pytest.mark.slow
def test_survivors_are_named(tmp_path):
    """A change that a test notices is counted, one that none notices is named, and one that is excused is neither."""
    shutil.copytree(MUTANTS, tmp_path / "tests" / "mutants", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "shop.py").write_text(
        "def price(amount, member):\n"
        "    if member:\n"
        "        amount = amount * 2\n"
        "    return amount\n"
        "\n"
        "def idle():\n"
        "    return 5\n",
        encoding="utf-8",
    )
    (tmp_path / "tests" / "test_shop.py").write_text(
        "import shop\n\n"
        "def test_price():\n    assert shop.price(2, False) == 2\n    shop.price(2, True)\n    shop.idle()\n\n"
        "def test_unfirm():\n    with open('ran', 'x'):\n        shop.price(2, True)\n",
        encoding="utf-8",
    )
    (tmp_path / "tests" / "mutants" / "plan.toml").write_text(
        '[[area]]\nmodules = ["shop.py"]\ntests = ["tests/test_shop.py"]\n', encoding="utf-8"
    )
    (tmp_path / "tests" / "mutants" / "equivalent.toml").write_text(
        '[[equivalent]]\nmodule = "shop.py"\nfunction = "idle"\n'
        'source = "return 5"\nchange = "5  →  6"\nreason = "nobody asks"\n',
        encoding="utf-8",
    )
    scores = tmp_path / "tests" / "mutants" / "scores.md"
    scores.write_text(
        "Said before.\n\n"
        "| module | places | tried | noticed | equivalent | left | score |\n|---|--:|--:|--:|--:|--:|--:|\n"
        "| gone.py | 1 | 1 | 1 | 0 | 0 | 100.0% |\n"
        "| pytest.ini | 1 | 1 | 1 | 0 | 0 | 100.0% |\n"
        "| shop.py | 8 | 8 | 8 | 0 | 0 | 100.0% |\n",
        encoding="utf-8",
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers =\n    slow\n", encoding="utf-8")
    (tmp_path / ".coveragerc").write_text("[run]\nsource = .\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    done = subprocess.run(
        [sys.executable, "tests/mutants", "--sample", "0", "--write"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert 1 == done.returncode, done.stdout + done.stderr
    assert "left out, as it fails in a fork without any change: tests/test_shop.py::test_unfirm" in done.stdout
    # `if member` → `if True` and a price of None are noticed; what is done for members, and the idle, are not.
    for text in (
        "if member  →  if False",
        "amount * 2  →  amount + 2",
        "2  →  3",
        "2  →  1",
        "return 5  →  return None",
        "5  →  4",
    ):
        assert f"    {text}\n" in done.stdout
    row = "| shop.py | 9 | 9 | 2 | 1 | 6 | 25.0% |"
    assert row in done.stdout
    # In the table the row has taken the place of the one before; another module's stays, one that is gone does not.
    heading = "| module | places | tried | noticed | equivalent | left | score |\n|---|--:|--:|--:|--:|--:|--:|\n"
    assert f"Said before.\n\n{heading}| pytest.ini | 1 | 1 | 1 | 0 | 0 | 100.0% |\n{row}\n" == scores.read_text("utf-8")
