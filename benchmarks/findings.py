"""The findings for faults, and of runs without one: `make findings` writes it to FINDINGS.md.

Twenty real PyTorch loops have one planted fault each, timed by a stopwatch (`_planted.py`). A loop counts as found if
the first or second finding names the cause. Ten scripts run under the command alone (`_scripts.py`). Loops have faults
at multiples of a rule's threshold (`_thresholds.py`). Healthy runs are simulated (`healthy_runs.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import _scripts, _thresholds, healthy_runs
from deep500_timing._views.findings import evidence_of, find, verdict
from deep500_timing.runs import Run

CAUSES = {
    "slow loader": (("waits-for-data",), "IO"),
    "one slow worker": (("waits-for-data",), "IO"),
    "tokenizes in the loop": (("waits-for-data",), "IO"),
    "loader stalls": (("waits-for-data",), "every 40 steps"),
    "workers start slowly": (("waits-for-data",), "each the first of EPOCH"),
    "slow loader of one rank": (("late-rank", "waits-for-data"), "ank 1"),
    "large gradients": (("exposed-communication",), "Communication"),
    "compiles first": (("warm-up",), "first step"),
    "slow from step 120 on": (("level-shift",), "FORWARD"),
    "a list that grows": (("drift", "unnamed"), "BATCH"),
    "tensors are kept": (("memory-grows",), "grows by"),
    "clipping": (("dominant-region",), "clip"),
    "clipping in no region": (("unnamed",), "after optimizer"),
    "slow log": (("unnamed",), "after optimizer"),
    "sleep each 40th step": (("spikes",), "the rest of BATCH"),
    "garbage collection": (("spikes",), "mostly in GC"),
    "callback each 50th step": (("outside-steps",), "every 50 steps"),
    "checkpoints": (("outside-steps",), "checkpoint"),
    "checkpoints in no region": (("outside-steps",), "every 40 steps"),
    "validates often": (("outside-steps",), "validation"),
    "pauses between epochs": (("between-epochs",), "between two epochs"),
}
"""For each fault the rules that may find it, and a word of the sentence that names the cause."""
RANKS = {"slow loader of one rank": 2, "large gradients": 2}


def train(fault: str, folder: str) -> dict[str, float]:
    """Run a loop in separate processes; returns the stopwatch's times of the last rank."""
    ranks = RANKS.get(fault, 1)
    environment = dict(os.environ)
    if ranks > 1:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks._planted", fault, folder],
            stdout=subprocess.PIPE,
            text=True,
            env=environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"The loop with the fault {fault!r} ended with {[p.returncode for p in started]}.")
    found: dict[str, float] = json.loads(said[-1].splitlines()[-1])
    return found


def judge(fault: str) -> tuple[bool, dict[str, float], list[str]]:
    """Whether the cause is named first or second; the stopwatch's times; the sentences."""
    rules, word = CAUSES[fault]
    folder = tempfile.mkdtemp(prefix="planted-")
    try:
        truth = train(fault, f"{folder}/run")
        with Run.open(f"{folder}/run") as run:
            evidence = evidence_of(run)
            found = find(evidence)
            said = [finding.text for finding in found] or [verdict(evidence).text]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    hit = any(finding.rule in rules and word in finding.text for finding in found[:2])
    return hit, truth, said


def planted(faults: list[str]) -> list[str]:
    """The table of faults."""
    rows, hits = [], 0
    for fault in faults:
        load = os.getloadavg()[0]
        hit, truth, said = judge(fault)
        hits += hit
        took = "–" if fault == "tensors are kept" else f"{truth['fault_s']:.1f} of {truth['loop_s']:.1f} s"
        row = (
            f"| {fault} | {load:.1f} | {took} | {'yes' if hit else '**no**'} | {'<br>'.join(said).replace('|', '/')} |"
        )
        print(row, file=sys.stderr, flush=True)
        rows.append(row)
    return [
        "## Faults in real loops",
        "",
        f"**Of {len(faults)} loops, the first or second finding names the cause in {hits}.** The loops are in",
        "`benchmarks/_planted.py`: 240 steps of PyTorch on the CPU, with one fault each. A stopwatch around the fault",
        "says how long it took; in workers and in a compiled start it measures in another process or sleeps.",
        "The load is the machine's over the minute before.",
        "",
        "| fault | load | took | named | what was said |",
        "|---|--:|---|---|---|",
        *rows,
        "",
    ]


def healthy(runs: int, first: int) -> list[str]:
    """The table of healthy runs."""
    by_rule, said = healthy_runs.count(range(first, first + runs), progress=True)
    wrong = len({seed for seed, *_ in said})
    lines: list[Any] = [
        "## Healthy runs",
        "",
        f"**{wrong} of {runs} healthy runs ({wrong / runs:.1%}) have a finding.** At most 1 % was aimed at. They are",
        f"simulated, of {len(healthy_runs.KINDS)} kinds, with the seeds {first} to {first + runs - 1}",
        "(`benchmarks/healthy_runs.py`).",
        "",
    ]
    lines += [f"- run {seed} ({kind}): {text}" for seed, kind, text in said]
    lines += [f"- {rule}: {number}" for rule, number in by_rule.most_common()]
    return lines


def main() -> None:
    """Run both, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", nargs="*", default=list(CAUSES), help="These faults only.")
    parser.add_argument("--runs", type=int, default=240, help="Healthy runs.")
    parser.add_argument("--first", type=int, default=90_000, help="The seed of the first healthy run.")
    parser.add_argument("--seeds", type=int, default=20, help="Runs at each multiple of a threshold.")
    parser.add_argument("--ratios", type=int, nargs="*", default=[0, *_thresholds.RATIOS], help="Of these; 0: healthy.")
    parser.add_argument("--jobs", type=int, default=5, help="Of these at the same time.")
    parser.add_argument("--seconds", type=float, default=1800, help="Begin none of these after that time.")
    parser.add_argument("--scripts", action=argparse.BooleanOptionalAction, default=True, help="Run the ten scripts.")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("FINDINGS.md"))
    arguments = parser.parse_args()
    before = arguments.output.read_text(encoding="utf-8") if arguments.output.exists() else ""
    parts = {part.partition("\n")[0]: "## " + part.rstrip() for part in before.split("\n## ")[1:]}
    made: list[list[str]] = []
    if arguments.faults:
        made.append(planted(arguments.faults))
    if arguments.scripts:
        made.append(_scripts.scripts())
    if arguments.seeds:
        made.append(_thresholds.thresholds(arguments.seeds, arguments.jobs, arguments.seconds, arguments.ratios))
    if arguments.runs:
        made.append(healthy(arguments.runs, arguments.first))
    # A part that was not asked for stays.
    parts |= {lines[0].removeprefix("## "): "\n".join(lines).rstrip() for lines in made}
    text = "\n\n".join(["# What findings say\n\nWritten by `make findings`.", *parts.values()])
    arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
