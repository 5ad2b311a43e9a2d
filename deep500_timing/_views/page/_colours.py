"""One colour for each region in every chart. Grey is time in no region, or time that was not measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._base.names import BACKWARD, BATCH, COMM, EPOCH, FORWARD, IO

if TYPE_CHECKING:
    from collections.abc import Iterable

GREY = "#9a9a9a"
ACCENT = "#0072b2"
ALARM = "#d55e00"
# The colours of Okabe and Ito, which colour-blind readers can tell apart, and variants of the same hues.
REGION_COLOURS = {
    FORWARD: "#0072b2",
    BACKWARD: "#009e73",
    IO: "#e69f00",
    COMM: "#cc79a7",
    "optimizer": "#56b4e9",
    "OPTIMIZER": "#56b4e9",
    "VALIDATION": "#8f7fc9",
    BATCH: "#7f97ad",
    EPOCH: "#a9b8c6",
    "FIT": "#c3ccd5",
}
_OTHERS = (
    "#d55e00",
    "#56b4e9",
    "#b3a200",
    "#8f7fc9",
    "#117733",
    "#aa4466",
    "#44aa99",
    "#7a5230",
    "#6699cc",
    "#dd7799",
    "#999933",
    "#4c6a92",
)


class Colours:
    """Colours by region: fixed for those of nearly every run, by order for the others."""

    def __init__(self, names: Iterable[str]) -> None:
        self._of: dict[str, str] = {}
        names = list(dict.fromkeys(names))
        taken = {REGION_COLOURS[name] for name in names if name in REGION_COLOURS}
        free = [colour for colour in _OTHERS if colour not in taken]
        place = 0
        for name in names:
            if name in REGION_COLOURS:
                self._of[name] = REGION_COLOURS[name]
            else:
                self._of[name] = free[place % len(free)]
                place += 1

    def of(self, name: str) -> str:
        """The colour of a region; grey for an unknown one."""
        return self._of.get(name, GREY)


def on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return "#000000" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 else "#ffffff"
