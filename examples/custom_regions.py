"""Regions of your own: names instead of keys, a decorator, a generator, an error in the middle.

Run it with::

    python examples/custom_regions.py
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import deep500_timing as timer

# A run without end keeps the last thousand intervals of each region; totals and means stay exact for all of it.
tmr = timer.Timer(keep_last=1000)


@tmr.timed("tokenise")
def tokenise(line: str) -> list[str]:
    """Each call is one interval."""
    return line.lower().split()


@tmr.timed("read")
def read(lines: int) -> Iterator[str]:
    """Of a generator each resumption is an interval: the time spent in here, not in the loop that uses it."""
    random = np.random.default_rng(0)
    words = ["loss", "Gradient", "step", "Batch", "epoch"]
    for _ in range(lines):
        yield " ".join(random.choice(words, size=50))


def main() -> None:
    """Count words, and lose one line to an error."""
    counts: dict[str, int] = {}
    for number, line in enumerate(read(2000)):
        try:
            with tmr.region("count"):
                if number == 1234:
                    raise ValueError("a bad line")
                for word in tokenise(line):
                    counts[word] = counts.get(word, 0) + 1
        except ValueError as error:
            # The region was closed, its time is not among the others, and the table says so.
            print(f"line {number} is left out: {error}")
    tmr.print_all_time_stats()


if __name__ == "__main__":
    main()
