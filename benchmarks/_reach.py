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
        text: What is compared.
        targets: For the compiled and for the plain form.
        measure: Takes the results and a form; returns median, first and third quartile, or None if not measured.
        at_least: Whether more is better.
        unit: Behind the numbers.
    """

    text: str
    targets: tuple[float, float]
    measure: Callable[[dict[str, Any], str], tuple[float, float, float] | None]
    at_least: bool = False
    unit: str = ""

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


GOALS = (
    Goal(f"`start/end` ÷ {CLOCK}", (0.9, 2.6), _to_clock("warm_ratio", "start/end")),
    Goal(f"`with region` ÷ {CLOCK}", (1.4, 3.5), _to_clock("warm_ratio", "with region")),
    Goal("Deep500's design ÷ `start/end`", (12, 4), _peer("Deep500's design", "start/end"), at_least=True),
    Goal("DeepSpeed named timer ÷ `start/end`", (5.5, 1.8), _peer("DeepSpeed named timer", "start/end"), at_least=True),
    Goal(
        "Lightning SimpleProfiler start/stop ÷ `start/end`",
        (3, 1.0),
        _peer("Lightning SimpleProfiler start/stop", "start/end"),
        at_least=True,
    ),
    Goal("torchtnt `Timer.time` ÷ `with region`", (7, 3), _peer("torchtnt Timer.time", "with region"), at_least=True),
    Goal(f"cold `start/end` ÷ cold {CLOCK}", (1.3, 3.5), _to_clock("cold_ratio", "start/end")),
    Goal("an empty region reads", (40, 75), _to_clock("reads_ns", "start/end"), unit=" ns"),
    Goal(f"disabled pair ÷ {CLOCK}", (0.3, 0.6), _to_clock("warm_ratio", "start/end, disabled")),
    Goal("99.99th percentile of a pair over 10⁶", (5, 25), _tail, unit=" µs"),
    Goal("Python's `statistics` of 10⁶ intervals ÷ ours", (50, 50), _statistics, at_least=True),
    Goal("`import deep500_timing` over bare Python", (12, 12), _import, unit=" ms"),
)


def keras_within_noise(results: dict[str, Any]) -> bool | None:
    """Whether the callback's overhead cannot be told from that of no change at all; None if not measured."""
    runs = results.get("keras", {}).get("runs", {})
    ours = runs.get("TimerCallback", {}).get("overhead_percent")
    noise = runs.get("no timing, again", {}).get("overhead_percent")
    if not ours or not noise:
        return None
    return bool(ours["low"] <= max(0.0, noise["high"]))
