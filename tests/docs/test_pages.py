"""The pages next to the README are right: links and anchors, Python blocks, commands with their options."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / folder / "README.md" for folder in ("adapters", "tests")] + sorted((ROOT / "benchmarks").glob("*.md"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}


def python_blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", TEXTS[page], flags=re.MULTILINE | re.DOTALL)


BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT).as_posix()}:{number}")
    for path in PAGES
    for number, block in enumerate(python_blocks(path))
]
WHOLE = [ROOT / "README.md"]
WHOLE += [
    ROOT / "docs" / f"{name}.md"
    for name in ["runs", "goodput", "ranks", "layers", "compare", "how-to", "exporters", "reference/core"]
]
WHOLE += sorted((ROOT / "docs" / "tutorials").glob("*.md"))
"""Pages with blocks that are whole programs."""
ELSEWHERE = {
    "adapters/README.md": "tests/core/test_adapters_readme.py",
    "docs/pipeline.md": "tests/examples/test_examples.py",  # Excerpts, with calls that examples/pipeline.py makes.
    "docs/report.md": "tests/page/test_page.py",
    "docs/run-format.md": "tests/runs/test_damage.py",
    "docs/trainers.md": "tests/trainers/test_trainer_pages.py",
}
"""Pages with blocks that another test runs."""
# The reader's part of README's loops.
PREPARED = {
    # Else it compiles an operator for a minute.
    "\nimport deepspeed\n": """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
""",
    "train_step(batch)": """
import torch
net = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(100)]
def train_step(batch):
    torch.nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
    optimizer.step()
""",
    "model.fit(": """
import keras
import numpy as np
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
images, labels = np.random.rand(1000, 64), np.random.randint(10, size=1000)
""",
}
PROGRAM = """
for block in {blocks!r}:
    try:
        exec(compile(block, "<page>", "exec"), {{"__name__": "__main__"}})
    except SystemExit:  # a page about restarts
        pass
"""
NEEDS = ("torch", "keras", "tensorflow", "transformers", "lightning", "jax", "deepspeed")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    heads = re.findall(
        r"^#+ +(.+?)\s*$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file finds it, and every anchor its heading."""
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", TEXTS[page]):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert [] == broken


@pytest.mark.parametrize("block", BLOCKS)
def test_names_of_ours_are_there(block: str) -> None:
    """A Python block is Python, and its imports of this package can be imported."""
    for node in ast.walk(ast.parse(block)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("deep500_timing"):
            continue
        if "torch" in node.module and importlib.util.find_spec("torch") is None:
            pytest.skip("needs torch")
        module = import_module(node.module)
        assert [] == [name.name for name in node.names if not hasattr(module, name.name)]


@pytest.mark.parametrize("page", WHOLE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_blocks_run(page: Path, forks, tmp_path: Path, monkeypatch) -> None:
    """The Python blocks of a page run as they stand, one after the other in one process."""
    blocks = ["".join(PREPARED[mark] for mark in PREPARED if mark in one) + one for one in python_blocks(page)]
    if page.name == "goodput.md":  # It reads the run that this page writes.
        blocks = python_blocks(page.parent / "runs.md") + blocks
    imported = {name for block in blocks for name in re.findall(r"^(?:import|from) (\w+)", block, flags=re.MULTILINE)}
    for name in sorted(imported & {*NEEDS}):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "output"
    start = forks.start_tensorflow if "keras" in imported else forks.start
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = start(["-c", PROGRAM.format(blocks=blocks)], environment, output)
    try:
        assert done.wait(300) == 0, output.read_text()[-4000:]
    finally:
        done.kill()


def test_no_two_pages_have_one_title() -> None:
    """In the menu and among the results of a search a title names one page."""
    titles = [text.partition("\n")[0] for page, text in TEXTS.items() if page.is_relative_to(ROOT / "docs")]
    assert [] == [title for title in titles if title.startswith("# ") and titles.count(title) > 1]


def test_a_long_page_begins_with_its_summary() -> None:
    """A page of more than 1 500 words says in a few what it is for."""
    long = {page: text for page, text in TEXTS.items() if len(text.split()) > 1500 and ROOT / "docs" in page.parents}
    assert [] == [page.name for page, text in long.items() if "\n\n> **In short.**" not in text[:200]]


def test_every_block_is_run_by_a_test() -> None:
    """A page with Python blocks is run here, or by the test that is named for it."""
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES if python_blocks(page)}
    assert pages == {page.relative_to(ROOT).as_posix() for page in WHOLE if python_blocks(page)} | {*ELSEWHERE}
    assert [] == [
        page for page, test in ELSEWHERE.items() if Path(page).stem not in (ROOT / test).read_text(encoding="utf-8")
    ]


def test_gallery_has_each_problem() -> None:
    """With its script's own words for the problem and the remedy, and the commands that show both."""
    page = " ".join((ROOT / "docs" / "gallery.md").read_text(encoding="utf-8").split())
    for path in (ROOT / "examples" / "gallery").glob("*.py"):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        problem, remedy = " ".join(said.replace("``", "`").split()).split(" Fixed: ")
        script = f"(../examples/gallery/{path.name})"
        parts = problem, f"**Remedy:** {remedy}", script, f" {path.name} --fixed"
        assert [] == [text for text in parts if text not in page]


def test_the_part_of_an_output_that_a_page_shows(monkeypatch) -> None:
    """As many lines as before; findings from the first to an empty line; all from the line with the same word."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    shown = import_module("page_outputs").shown
    output = "run · 1 rank\n\n  1  IO is slow:\n     wait.\n\nregion  total\nB is faster.\n"
    assert "run · 1 rank\n\n...\n" == shown(output, "run · 2 ranks\n\n...\n")
    assert "  1  IO is slow:\n     wait.\n" == shown(output, "  Nothing stands out\n")
    assert "B is faster.\n" == shown(output, "B is slower.\nvery.\n")


def test_a_word_that_the_house_does_not_use_is_found(monkeypatch, tmp_path) -> None:
    """The check of `make lint` names the line of a word, and counts odd turns in pages and in the prose of code."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    faults_of = import_module("words").faults_of
    page, code = tmp_path / "page.md", tmp_path / "code.py"
    page.write_text("`nobody` waits.\nWhoever waits.\n")
    assert [f"{page}:2: 'Whoever': name the actor", f"{page}: 1 odd turns"] == [
        fault.partition(" in ")[0] for fault in faults_of(page)
    ]
    code.write_text("whose = 'whose'  # Plain.\n")
    assert [] == faults_of(tmp_path)
    code.write_text("whose = 'whose'  # It is what it is.\n")
    assert [f"{tmp_path}: 1 odd turns"] == [fault.partition(" in ")[0] for fault in faults_of(tmp_path)]


def test_commands_are_there() -> None:
    """Each subcommand that a page shows exists, and has the options that are shown with it."""
    pytest.importorskip("click")
    from deep500_timing._command._app import app

    shown = [
        (path.name, name, re.findall(r"(?<=\s)--[a-z-]+", rest))
        for path, text in TEXTS.items()
        for name, rest in re.findall(r"deep500-timing (?!help)([a-z]+)\b(?![ a-z]*:)([^\n`#|]*)", _code(text))
    ]
    assert len(shown) > 10
    wrong = []
    for page, name, options in shown:
        command = app.get_command(None, name)
        known = {option for parameter in command.params for option in parameter.opts} if command else set()
        if name in ("run", "ab"):  # The options of the user's program follow.
            known |= {"--run", "--quiet", *options}
        if command is None or not {*options} <= known | {"--help"}:
            wrong.append((page, name, options))
    assert [] == wrong


def _code(text: str) -> str:
    # Blocks and what stands between backticks; prose may have "deep500-timing" before any word.
    blocks = re.findall(r"^```(?:sh|text)?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}(deep500-timing .*)$", text, flags=re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)])
