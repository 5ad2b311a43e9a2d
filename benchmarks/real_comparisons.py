"""False alarms and power of ``ab`` on real trainings: A against A, and A against A with a sleep of 5 % in one region.

Run it with ``python -m benchmarks.real_comparisons [A/A] [SLEEPS]``, 30 and 10 unless told otherwise, and put what it
prints into ``COMPARISON.md``. The program is ``examples/pytorch_loop.py``. Each line appears as its experiment ends;
one takes up to two minutes. Other load on the machine belongs to its subject, so name it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "examples" / "pytorch_loop.py"
EPOCHS, PAIRS = 16, 5
REGIONS = ("BACKWARD", "FORWARD", "IO")
SLOW_DATA = """def slow(batches):
    for batch in batches:
        time.sleep({seconds!r})
        yield batch


def train_epoch("""


def with_sleep(region: str, seconds: float) -> str:
    """The program's text with a sleep in each pass through a region."""
    text = PROGRAM.read_text().replace("import argparse\n", "import argparse\nimport time\n")
    if region == "IO":
        text = text.replace("def train_epoch(", SLOW_DATA.format(seconds=seconds))
        return text.replace("tmr.steps(loader,", "tmr.steps(slow(loader),")
    line = f"        with tmr.region(timer.TimeType.{region}, gpu=True):\n"
    return text.replace(line, f"{line}            time.sleep({seconds!r})\n")


def ab(folder: Path, name: str, a: str, b: str) -> dict:
    """The answer of one experiment on two texts of the program."""
    sides = []
    for side, text in (("a", a), ("b", b)):
        (folder / f"{name}-{side}.py").write_text(text)
        sides.append([sys.executable, f"{name}-{side}.py", "--epochs", str(EPOCHS)])
    command = [sys.executable, "-m", "deep500_timing", "ab", "-n", str(PAIRS), "--json", "--run", name, "--"]
    ended = subprocess.run([*command, *sides[0], "---", *sides[1]], capture_output=True, text=True, cwd=folder)
    if not ended.stdout:
        raise RuntimeError(ended.stderr)
    return json.loads(ended.stdout)


def path_of(region: dict | None) -> str:
    """A region's own name."""
    return "–" if region is None else region["path"].rpartition("/")[2]


def row(name: str, found: dict) -> str:
    """A line of the table."""
    step = found["step"]
    low, high = step["interval"]
    named = [path_of(one) for one in found["regions"] if one["verdict"] in ("slower", "faster")]
    explains = path_of(found["explains"])
    load = max(one["load"] for one in found["runs_a"] + found["runs_b"])
    return (
        f"| {name} | {len(found['runs_a'])} | {step['change']:+.1%} | {low:+.1%} to {high:+.1%} | {step['verdict']} |"
        f" {', '.join(named) or '–'} | {explains} | {load:.1f} |"
    )


def main() -> None:
    """Run the experiments and print the table."""
    same, sleeps = (int(sys.argv[at]) if len(sys.argv) > at else many for at, many in ((1, 30), (2, 10)))
    plain, alarms, right, step_s = PROGRAM.read_text(), 0, 0, 0.0
    print("| experiment | pairs | step | 90 % | verdict | regions that differ | explains most | load |")
    print("| --- | ---: | ---: | ---: | --- | --- | --- | ---: |")
    with tempfile.TemporaryDirectory() as made:
        for at in range(same):
            found = ab(Path(made), f"same{at}", plain, plain)
            alarms += found["step"]["verdict"] in ("slower", "faster")
            print(row(f"A/A {at + 1}", found), flush=True)
        for at in range(sleeps):
            region = REGIONS[at % len(REGIONS)]
            step_s = step_s or ab(Path(made), "before", plain, plain)["step"]["a_s"]
            found = ab(Path(made), f"sleep{at}", plain, with_sleep(region, 0.05 * step_s))
            right += path_of(found["explains"]) == region
            print(row(f"{region} + 5 %", found), flush=True)
    print(f"\n{alarms} of {same} A/A experiments gave an alarm; {right} of {sleeps} name the region with the sleep.")


if __name__ == "__main__":
    main()
