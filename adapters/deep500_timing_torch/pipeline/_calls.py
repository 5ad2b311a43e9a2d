"""Wrappers that note when a schedule runs its stages, issues messages and waits for them, and what the notes mean.

A message has three calls: one makes the operation, one issues it and returns a handle, one waits for the handle. The
operation carries a tag from the first call to the second, and the list of handles carries it to the third.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing_torch.pipeline._actions import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

REGIONS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward input",
    Kind.BACKWARD_WEIGHT: "backward weight",
}
"""The names in a stage's regions: ``stage 0 forward``. Others are ``pipeline load`` and so on."""

Event = tuple[Kind, int, int, int, int, int]
"""Kind, stage, micro-batch, start, end, and which of its region's intervals on the device it is; -1 without one."""


class Codes:
    """Small numbers for kinds of actions on stages."""

    def __init__(self, evaluation: bool = False) -> None:
        self._evaluation = evaluation
        self._known: dict[tuple[Kind | None, int], int] = {}
        self.meanings: list[tuple[Kind | None, int]] = []
        """Kind and stage by code; the kind of a loss is None."""
        self.regions: list[str] = []

    def of(self, kind: Kind | None, stage: int) -> int:
        """The code of a kind of action on a stage, None for the loss."""
        code = self._known.get((kind, stage))
        if code is None:
            if kind is None:
                name = "pipeline loss"
            else:
                what = "evaluation " if self._evaluation else ""
                name = f"stage {stage} {what}{REGIONS[kind]}" if kind in REGIONS else f"pipeline {what}{kind.value}"
            code = self._known[kind, stage] = len(self.meanings)
            self.meanings.append((kind, stage))
            self.regions.append(name)
        return code

    def region_of(self, kind: Kind, stage: int) -> str:
        return self.regions[self.of(kind, stage)]


def events_of(notes: Iterable[CallRow], codes: Codes) -> list[Event]:
    """What notes say; those without a time are left out.

    A forward pass reaches to the end of its loss, which follows it.
    """
    found: list[Event] = []
    for code, microbatch, start_ns, end_ns, ordinal in notes:
        if start_ns < 0 or end_ns < 0:
            continue
        kind, stage = codes.meanings[code]
        if kind is not None:
            found.append((kind, stage, microbatch, start_ns, end_ns, ordinal))
            continue
        for place in range(len(found) - 1, -1, -1):
            event = found[place]
            if event[:2] == (Kind.FORWARD, stage):
                found[place] = (*event[:4], end_ns, event[5])
                break
    return found


CallRow = tuple[int, int, int, int, int]
"""Code, micro-batch, start and end in ns, and the index among its region's device intervals (-1 without one)."""

_TAG = "_deep500_timing_message"


class CallLog:
    """The calls that the wrappers of one schedule noted since the last :meth:`take`, in the order of their ends."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.active = False
        self.now_ns = now_ns
        self._rows: list[CallRow] = []

    def note(self, code: int, microbatch: int, start_ns: int, end_ns: int, ordinal: int = -1) -> None:
        self._rows.append((code, microbatch, start_ns, end_ns, ordinal))

    def take(self) -> list[CallRow]:
        """Return the noted calls and forget them."""
        rows, self._rows = self._rows, []
        return rows


class _Message(NamedTuple):
    log: CallLog
    issued: int
    waited: int
    incoming: bool
    microbatch: int


class _Handles(list[Any]):
    """The handles of issued messages; ``messages`` has one entry per operation, None for an unknown operation."""

    messages: list[_Message | None]


def time_calls(function: Callable[..., Any], log: CallLog, code_of: Callable[[dict[str, Any]], int]) -> Any:
    """Time each call of a function that takes the micro-batch as first argument."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not log.active:
            return function(*args, **kwargs)
        start_ns = log.now_ns()
        result = function(*args, **kwargs)
        log.note(code_of(kwargs), _microbatch(args), start_ns, log.now_ns())
        return result

    return call


def tag_messages(function: Callable[..., Any], log: CallLog, issued: int, waited: int, incoming: bool) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        operations = function(*args, **kwargs)
        if log.active:
            message = _Message(log, issued, waited, incoming, _microbatch(args))
            for operation in operations:
                setattr(operation, _TAG, message)
        return operations

    return call


def time_issues(function: Callable[..., Any]) -> Any:
    """Time each call of a function that issues a list of operations and returns a list of handles."""

    @functools.wraps(function)
    def call(operations: Any, *args: Any, **kwargs: Any) -> Any:
        messages = [getattr(operation, _TAG, None) for operation in operations]
        log = _log_of(messages)
        if log is None:
            return function(operations, *args, **kwargs)
        start_ns = log.now_ns()
        issued = function(operations, *args, **kwargs)
        end_ns = log.now_ns()
        before = None
        for message in messages:
            if message is not None and message is not before:  # One call makes several operations of one message.
                log.note(message.issued, message.microbatch, start_ns, end_ns)
            before = message
        handles = _Handles(issued)
        handles.messages = messages
        return handles

    return call


def time_waits(function: Callable[..., Any], each: bool) -> Any:
    @functools.wraps(function)
    def call(handles: Any) -> Any:
        messages = handles.messages if isinstance(handles, _Handles) else []
        log = _log_of(messages)
        if log is None:
            return function(handles)
        start_ns = log.now_ns()
        if each and len(handles) == len(messages):
            for handle, message in zip(handles, messages, strict=True):
                handle.wait()
                end_ns = log.now_ns()
                if message is not None:
                    log.note(message.waited, message.microbatch, start_ns, end_ns)
                start_ns = end_ns
            return None
        result = function(handles)
        # One wait for several messages counts as a wait for the first incoming one: sends complete without the peer.
        known = [message for message in messages if message is not None]
        message = next((one for one in known if one.incoming), known[0])
        log.note(message.waited, message.microbatch, start_ns, log.now_ns())
        return result

    return call


def _microbatch(args: tuple[Any, ...]) -> int:
    return args[0] if args and type(args[0]) is int else -1


def _log_of(messages: list[_Message | None]) -> CallLog | None:
    for message in messages:
        if message is not None:
            return message.log if message.log.active else None
    return None
