"""Write ``docs/gallery.md``: each problem of ``examples/gallery`` with its report, before and after.

    python tools/gallery.py [NAME...]

With names, only the sections of these problems are written again.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from pathlib import Path

from page_outputs import printed

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "gallery.md"
PROBLEMS = {
    "slow_loader": "A slow loader",
    "restarting_workers": "Workers that start again",
    "waiting_line": "A line that waits",
    "late_host": "A late host",
    "pipeline_bubble": "A pipeline's bubble",
    "recompilation": "Recompilation",
    "growing_memory": "Memory that grows",
    "checkpoint_stalls": "Checkpoints that stop training",
    "many_small_operations": "Many small operations",
    "communication_bound": "Too much communication",
}
RANKS = {"late_host", "pipeline_bubble", "communication_bound"}
"""Problems of two ranks, started by torchrun."""
PRINTS = {"pipeline_bubble": "The account of the bubble"}
"""Problems with a script that prints its own account."""
COMPARED = {"slow_loader", "waiting_line", "many_small_operations"}
"""Problems of one process that are in each step, which is what ``ab`` compares."""
HEAD = """# Gallery

> **In short.** Each section has a fault, the first finding about it, the remedy, and the same program with it.

Ten problems, each planted in one small script in `examples/gallery`, with the report of `deep500-timing` and the
remedy. `make gallery` runs the scripts and writes this page. The machine has two cores and no GPU. A line that
synchronizes with the GPU and a launch-bound step are shown by what resembles them most on a CPU. Timings vary with the
load of the machine.

Where the fault is in each step, `ab` compares both forms. Where it is in a few steps, or a step has other work with the
remedy, the findings before and after tell the difference.
"""


def command_of(name: str, options: str = "") -> str:
    """The command that runs a problem's script."""
    launcher = "torchrun --nproc-per-node 2" if name in RANKS else "python"
    return f"{launcher} {name}.py{options}"


def findings(output: str) -> str:
    """The numbered sentences of ``show``."""
    lines = output.splitlines()
    first = next((place for place, line in enumerate(lines) if re.match(r"  1  ", line)), None)
    if first is None:  # nothing stands out
        first = next((place for place, line in enumerate(lines) if not line.strip()), -1) + 1
    last = next((place for place in range(first, len(lines)) if not lines[place].strip()), len(lines))
    return "\n".join(line.rstrip() for line in lines[first:last])


def section(name: str) -> str:
    """The section of one problem."""
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    described = (ast.get_docstring(ast.parse(source)) or "").replace("``", "`")
    problem, remedy = (part.strip() for part in described.split("\n\nFixed: "))
    parts = [f"## {PROBLEMS[name]}\n", f"{problem} [Script](../examples/gallery/{name}.py).\n"]
    sides = f"{command_of(name)} --- {command_of(name, ' --fixed')}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
        for run, options in (("before", ""), ("after", " --fixed")):
            launched = f"-- {command_of(name, options)}" if name in RANKS else f"{name}.py{options}"
            output = printed(f"deep500-timing run --quiet --run runs/{run} {launched}", folder)
            if options:
                parts.append(f"**Remedy:** {remedy}\n")
            if name in PRINTS:
                shown = "GPipe" + output.partition("GPipe")[2]
            else:
                shown = findings(printed(f"deep500-timing show runs/{run}", folder))
            parts.append(f"```text\n{shown.rstrip()}\n```\n")
        if name in COMPARED:
            compared = printed(f"deep500-timing ab -n 3 -- {sides}", folder)
            answer = re.search(r"^(B is |No difference|B / A)[^\n]*(\n(?!\n)[^\n]+)*", compared, flags=re.MULTILINE)
            shown = answer[0] if answer else compared[-1000:]
            parts.append(f"`deep500-timing ab -n 3 -- {sides}`:\n\n```text\n{shown.rstrip()}\n```\n")
    return "\n".join(parts)


def main(names: list[str]) -> None:
    """Write the page, or the sections named."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else HEAD
    sections = {part.split("\n", 1)[0]: "## " + part for part in page.split("\n## ")[1:]}
    for name in names or PROBLEMS:
        sections[PROBLEMS[name]] = section(name)
        print(sections[PROBLEMS[name]], flush=True)
        kept = [sections[title].rstrip() for title in PROBLEMS.values() if title in sections]
        PAGE.write_text("\n\n".join([HEAD.rstrip(), *kept]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
