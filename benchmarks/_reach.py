"""What this timer set out to reach, and whether it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks._contenders import CLOCK

FORMS = ("compiled", "plain")


@dataclass(frozen=True)
class Goal:
    """One line of the table.

    Attributes:
        text: The compared values.
        targets: For the compiled and for the plain form.
        measure: Takes the results and a form; returns median, first and third quartile, or None if not measured.
        at_least: Whether more is better.
        limits: What stands in the way in the compiled and in the plain form, for where it is not reached.
        unit: Behind the numbers.
    """

    text: str
    targets: tuple[float, float]
    measure: Callable[[dict[str, Any], str], tuple[float, float, float] | None]
    at_least: bool = False
    unit: str = ""
    limits: tuple[str, str] = ("", "")

    def reached(self, value: float, target: float) -> bool:
        """Whether the median is on the right side of the target."""
        return value >= target if self.at_least else value <= target


def _spread(found: dict[str, Any] | None) -> tuple[float, float, float] | None:
    return None if not found else (found["median"], found["low"], found["high"])


def _to_clock(kind: str, name: str) -> Callable[[dict[str, Any], str], tuple[float, float, float] | None]:
    return lambda results, form: _spread(results["contenders"].get(f"{name} ({form})", {}).get(kind))


def _peer(peer: str, name: str) -> Callable[[dict[str, Any], str], tuple[float, float, float] | None]:
    return lambda results, form: _spread(results["peer_ratios"].get(peer, {}).get(f"{name} ({form})"))


def _tail(results: dict[str, Any], form: str) -> tuple[float, float, float] | None:
    found = results["contenders"].get(f"start/end ({form})", {}).get("tail_ns")
    return None if not found else (found["p99.99"] / 1000,) * 3


def _statistics(results: dict[str, Any], form: str) -> tuple[float, float, float] | None:
    return _spread(results.get("statistics", {}).get("ratio", {}).get(f"every interval kept ({form})"))


def _import(results: dict[str, Any], form: str) -> tuple[float, float, float] | None:
    return _spread(results.get("imports", {}).get(f"deep500_timing ({form})"))


_FOLLOWS = "It follows from the first line."
_WITH_C = (
    "CPython's `with`: it binds two methods and calls them, which takes as long as two clock reads around a context "
    "manager in C that does nothing."
)
_PLAIN_PAIR = (
    "The calls themselves: two empty methods in Python take half as long as two clock reads, and 1.7 times as long "
    "with the clock read in them. Asking which thread it is adds 0.7; the rest is packing into 16 bytes, the look-up, "
    "the check for nesting and the stores. Tried without gain: thread-local storage in place of the thread's identity, "
    "one object in place of a region and its intervals, lists that grow in place of lists that are reused."
)
_PLAIN_WITH = (
    "Three calls of methods where `start/end` has two, each of which calls another: that keeps the logic in one place. "
    "Written out they would save about a fifth."
)
_TAIL = (
    "One pair in 1024 makes room for the next ones, in pages that the system hands out at their first use; beyond "
    "that, interrupts and other processes: compare with the bare clock's own tail, in the tables below."
)
_PLAIN_TAIL = (
    "One pair in 64 packs the last 64 intervals; beyond that, interrupts, the collector and other processes, which "
    "meet a pair the sooner the longer it takes: compare with the bare clock's own tail and the peers'."
)

GOALS = (
    Goal(f"`start/end` ÷ {CLOCK}", (0.9, 2.6), _to_clock("warm_ratio", "start/end"), limits=("", _PLAIN_PAIR)),
    Goal(f"`with region` ÷ {CLOCK}", (1.4, 3.5), _to_clock("warm_ratio", "with region"), limits=(_WITH_C, _PLAIN_WITH)),
    Goal(
        "Deep500's design ÷ `start/end`",
        (12, 4),
        _peer("Deep500's design", "start/end"),
        at_least=True,
        limits=(_FOLLOWS, _FOLLOWS),
    ),
    Goal(
        "DeepSpeed named timer ÷ `start/end`",
        (5.5, 1.8),
        _peer("DeepSpeed named timer", "start/end"),
        at_least=True,
        limits=(_FOLLOWS, _FOLLOWS),
    ),
    Goal(
        "Lightning SimpleProfiler start/stop ÷ `start/end`",
        (3, 1.0),
        _peer("Lightning SimpleProfiler start/stop", "start/end"),
        at_least=True,
        limits=(_FOLLOWS, _FOLLOWS + " SimpleProfiler knows no threads, and keeps 33 bytes instead of 16."),
    ),
    Goal(
        "torchtnt `Timer.time` ÷ `with region`",
        (7, 3),
        _peer("torchtnt Timer.time", "with region"),
        at_least=True,
        limits=("It follows from the second line.",) * 2,
    ),
    Goal(
        f"cold `start/end` ÷ cold {CLOCK}",
        (1.3, 3.5),
        _to_clock("cold_ratio", "start/end"),
        limits=(
            "Each line of code and data that is not in a cache takes about a tenth of a microsecond, and a busy "
            "neighbour keeps the clock's own lines, which every Python process shares, in the last-level cache.",
            "More code: the interpreter reads bytecode, names and objects, each from memory.",
        ),
    ),
    Goal(
        "an empty region reads",
        (40, 75),
        _to_clock("reads_ns", "start/end"),
        unit=" ns",
        limits=(
            "",
            "A return, a call of a method and two checks lie between the readings; the clock counts tens of ns.",
        ),
    ),
    Goal(
        f"disabled pair ÷ {CLOCK}",
        (0.3, 0.6),
        _to_clock("warm_ratio", "start/end, disabled"),
        limits=("", "Two methods in Python that do nothing at all take 0.5; the look at `enabled` is the rest."),
    ),
    Goal("99.99th percentile of a pair over 10⁶", (5, 25), _tail, unit=" µs", limits=(_TAIL, _PLAIN_TAIL)),
    Goal(
        "Python's `statistics` of 10⁶ intervals ÷ ours",
        (50, 50),
        _statistics,
        at_least=True,
        limits=("Sorting for the percentiles and the confidence interval of the median.",) * 2,
    ),
    Goal(
        "`import deep500_timing` over bare Python",
        (12, 12),
        _import,
        unit=" ms",
        limits=("Loading the shared libraries, and the load of the machine.",) * 2,
    ),
)


def keras_runs(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results for Keras, by kind; empty if nothing was."""
    found = results.get("keras", {})
    first = found.get("first_batch", {})
    named = {
        "Keras: a step of a tiny model": found.get("runs"),
        "Keras: a step of a larger model": found.get("longer"),
        "Keras: time to the first batch of a new model": first.get("new"),
        "Keras: time to the first batch of a model that was traced": first.get("warm"),
    }
    return {name: runs for name, runs in named.items() if runs}


def within_noise(runs: dict[str, Any]) -> bool | None:
    """Whether the callback's overhead cannot be told from that of no change at all; None if not measured."""
    ours = runs.get("TimerCallback", {}).get("overhead_percent")
    noise = runs.get("no timing, again", {}).get("overhead_percent")
    if not ours or not noise:
        return None
    return bool(ours["low"] <= 0.0 or ours["median"] <= noise["high"])


def seen_from(runs: dict[str, Any]) -> float | None:
    """From how many percent on an overhead of the callback would have been seen; None if not measured."""
    ours = runs.get("TimerCallback", {}).get("overhead_percent")
    noise = runs.get("no timing, again", {}).get("overhead_percent")
    if not ours or not noise:
        return None
    # What lies as far from nothing as its own interval is wide, and as what makes no difference may seem to.
    return float(max(ours["high"] - ours["low"], abs(noise["low"]), abs(noise["high"])))
