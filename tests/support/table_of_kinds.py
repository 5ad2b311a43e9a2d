"""What ``deep500-timing run`` sees of each kind of program, against its number of steps and a stopwatch inside it.

``make kinds`` runs the programs of ``kinds.py`` and ``kinds_of_others.py`` and writes ``docs/what-run-sees.md``.
``python table_of_kinds.py NAME ...`` runs some and prints their rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

TESTS = Path(__file__).parents[1]
PLAIN, OTHERS = (TESTS / "launch" / f"{name}.py" for name in ("kinds", "kinds_of_others"))
PAGE = TESTS.parent / "docs" / "what-run-sees.md"
RUN = [sys.executable, "-m", "deep500_timing", "run", "--run", "RUN"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FEW = 5
"""Of fewer times only the number is compared: a busy machine comes between the two clocks."""
LEAST, MOST, ALLOWED_S = 0.9, 1.5, 5e-4
"""The median of a phase lies between these shares of the stopwatch's, give or take so many seconds. The stopwatch of
frameworks is around a part of the phase: what sleeps in it."""


@dataclass(frozen=True)
class Kind:
    """A kind of program: what it is, the program, its steps, and how it is started."""

    title: str
    program: str
    steps: int
    note: str = ""
    before: tuple[str, ...] = ()
    """What stands between ``deep500-timing run`` and the program's file."""
    named: tuple[str, ...] = ()
    """Regions that are there beside those of the stopwatch."""


KINDS = [
    Kind("Plain loop, two epochs", "classifier", 80, named=("EPOCH",)),
    Kind("Loader with workers", "workers", 40),
    Kind("Several optimizers (GAN)", "gan", 40),
    Kind("Gradient penalty by `autograd.grad` (WGAN-GP)", "wgan_gp", 60),
    Kind("Replay buffer and environment (DQN)", "dqn", 119),
    Kind("Rollouts, then epochs over them (PPO)", "ppo", 64),
    Kind("AMP with a scaler, accumulation", "amp", 20),
    Kind("LoRA", "lora", 40),
    Kind("L-BFGS with a closure", "lbfgs", 15),
    Kind("Iterable data sets, as WebDataset", "iterable", 40),
    Kind("nanoGPT: memory map, evaluation, checkpoints", "nanogpt", 24, "the batch is cut by hand: no IO"),
    Kind("Diffusion with an average of the weights", "diffusion", 40),
    Kind("Detection", "detection", 24),
    Kind("Evaluation within an epoch", "evaluates_every_n", 60),
    Kind("Distributed checkpoints in the background", "saves_asynchronously", 60),
    Kind("FSDP2, two ranks", "fsdp2", 40, before=("--", sys.executable, *TORCHRUN)),
    Kind("An update by hand", "own_optimizer", 40, "the optimizer lasts until the next batch; the last one is unseen"),
    Kind("Optimizers that step in the backward pass", "steps_in_backward", 40, "the optimizer is part of BACKWARD"),
    Kind("Distillation", "distillation", 40),
    Kind("Meta-learning (MAML)", "maml", 40),
    Kind("Hugging Face Trainer, with SFT of TRL and PEFT", "hugging_face", 20, named=("EPOCH", "FIT")),
    Kind("Hugging Face Trainer that evaluates", "hugging_face_evaluates", 20),
    Kind("Hugging Face Trainer with DeepSpeed", "hugging_face_deepspeed", 20),
    Kind("Accelerate, with an evaluation", "accelerated", 20, named=("EPOCH",)),
    Kind("Accelerate with DeepSpeed", "accelerated_deepspeed", 20),
    Kind("DeepSpeed's engine", "deepspeed", 20),
    Kind("DeepSpeed ZeRO 1, two groups of parameters", "deepspeed_groups", 20),
    Kind("DeepSpeed ZeRO 2, two groups of parameters", "deepspeed_zero2", 20),
    Kind("DeepSpeed ZeRO 3", "deepspeed_zero3", 20),
    Kind("Lightning", "lightning", 20),
    Kind("Lightning Fabric", "fabric", 20),
    Kind("Keras `fit` on PyTorch", "keras_on_torch", 20),
    Kind("`run -- torchrun`, DDP", "ranks", 20, before=("--", sys.executable, *TORCHRUN)),
    Kind("`run -m torch.distributed.run`", "ranks", 20, before=tuple(TORCHRUN)),
    Kind(
        "`run -m accelerate.commands.launch`", "one_process", 20, before=("-m", "accelerate.commands.launch", "--cpu")
    ),
    Kind("A launcher that copies the environment: LLaMA-Factory, sweeps", "launcher", 20),
    Kind("An actor of Ray that trains: verl, OpenRLHF, Ray Train", "ray_actor", 20),
    Kind("Three trainings in one process (sweeps, k-fold)", "sweep", 60),
    Kind("A backward pass that the engine starts (Megatron's schedules)", "pipeline_engine", 20, "stand-in"),
    Kind("A generator for data (torchtitan, Grain)", "generator", 20, "the wait is `between steps`"),
    Kind("A loader that never ends (ultralytics)", "infinite", 40),
    Kind("`datasets` iterated directly", "hf_datasets", 20, "the wait is `between steps`"),
    Kind("Validation of a model and of its average (timm)", "averaged", 40),
    Kind("The whole step compiled", "compiled_step", 20, "its parts are compiled into one"),
    Kind("`torch.func`, with an evaluation", "functional", 40),
    Kind("A policy that generates before each update (GRPO)", "policy", 40),
    Kind("A second thread that calls models", "two_threads", 20),
    Kind("Weights that are updated by hand through `.data`", "by_hand", 20),
    Kind("Evolution strategies: no gradients", "evolution", 60),
]


@dataclass(frozen=True)
class Seen:
    """What was seen of a program: its steps, and the phases that are wrong, each with a reason."""

    steps: int
    wrong: tuple[str, ...] = ()
    error: str = ""


def run(kind: Kind, folder: Path) -> Seen:
    """Run a program under the command, and compare."""
    folder.mkdir(parents=True)
    file = PLAIN if f"def {kind.program}(" in PLAIN.read_text() else OTHERS
    command = [*RUN, *kind.before, str(file), kind.program, str(folder / "truth.json")]
    command[command.index("RUN")] = str(folder / "run")
    own = {"PYTHONPATH": f"{PLAIN.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    log = folder / "log"
    with log.open("w") as output:
        environment = {**os.environ, **own}
        ended = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output, check=False)
    if ended.returncode or not (folder / "run").is_dir():
        lines = log.read_text().strip().splitlines()
        return Seen(0, error=f"exit status {ended.returncode}: {lines[-1][:120] if lines else ''}")
    return judge(kind, regions_of(folder / "run"), json.loads((folder / "truth.json").read_text()))


def regions_of(run: Path) -> dict[str, list[float]]:
    """The times of each region of rank 0 in seconds."""
    from deep500_timing.runs import Run

    found: dict[str, list[float]] = {}
    with Run.open(run) as opened:
        for row in opened.intervals().arrow().to_pylist():
            if row["rank"] == 0:
                found.setdefault(row["region"], []).append(row["dur_ns"] / 1e9)
    return found


def judge(kind: Kind, found: dict[str, list[float]], truth: dict[str, list[float]]) -> Seen:
    """Compare regions with the stopwatch: as many times, and in the median as long."""
    wrong = [f"no {name}" for name in kind.named if name not in found]
    for name, theirs in truth.items():
        ours = found.get(name, [])
        if not ours:
            wrong.append(f"no {name}")
        elif name == "VALIDATION":  # all of it is one region: its data and what lies between the calls, too
            if sum(ours) < LEAST * sum(theirs):
                wrong.append(f"{name} {1e3 * sum(ours):.0f} ms for {1e3 * sum(theirs):.0f}")
        elif len(ours) != len(theirs):
            wrong.append(f"{name} {len(ours)} times for {len(theirs)}")
        elif len(theirs) < FEW:
            continue
        elif not LEAST * median(theirs) - ALLOWED_S <= median(ours) <= MOST * median(theirs) + ALLOWED_S:
            wrong.append(f"{name} {1e3 * median(ours):.1f} ms for {1e3 * median(theirs):.1f}")
    return Seen(len(found.get("BATCH", [])), tuple(wrong))


def row_of(kind: Kind, seen: Seen) -> str:
    """The row of the page."""
    steps = "yes" if seen.steps == kind.steps else f"{seen.steps} for {kind.steps}"
    phases = "no" if seen.error else "; ".join(seen.wrong) or "yes"
    return f"| {kind.title} | {steps} | {phases} | {seen.error or kind.note} |"


HEAD = """# What `run` sees

What [`deep500-timing run`](run-command.md) sees of {count} kinds of program. Each row is a small program that
`make kinds` runs on a CPU, with the real framework where it names one. Its number of steps is known, and a stopwatch
inside times its phases. A phase is right if it is there as often, and its median is at least 0.9 and at most 1.5 times
the stopwatch's, give or take 0.5 ms. Of fewer than five times only the number is compared.

Steps are right in {steps} of {count} kinds, phases in {phases}. A CUDA graph that is replayed, NeMo, Megatron's own
pipelines, vLLM and a cluster of several hosts need what this table's machine has not.

| kind of program | steps right | phases right | note |
|---|---|---|---|
"""


def main() -> None:
    """Print the rows; without names, write the page."""
    names = sys.argv[1:]
    kinds = [kind for kind in KINDS if not names or kind.program in names]
    results = []
    with tempfile.TemporaryDirectory() as root:
        for number, kind in enumerate(kinds):
            results.append(run(kind, Path(root) / str(number)))
            print(row_of(kind, results[-1]), flush=True)
    if names:
        return
    steps = sum(seen.steps == kind.steps for kind, seen in zip(kinds, results, strict=True))
    phases = sum(not (seen.wrong or seen.error) for seen in results)
    rows = "\n".join(map(row_of, kinds, results))
    PAGE.write_text(f"{HEAD.format(count=len(kinds), steps=steps, phases=phases)}{rows}\n")


if __name__ == "__main__":
    main()
