"""Sequences of events, with a clock that is moved by hand: which steps, epochs and evaluations come of them."""

from __future__ import annotations

import sys
import threading
import tracemalloc

import pytest

from deep500_timing import Timer
from deep500_timing.loop import BACKWARD, FORWARD, GRAD, IO, NO_GRAD, STEP, Loops
from deep500_timing.runs import RunLog
from deep500_timing.testing import ManualClock


class Optimizer:
    """Steps."""


class Model:
    """Its state changes with each update, and its gradients as they are cleared."""

    training = True
    updates = cleared = 0


CALLS = {"F": FORWARD, "N": NO_GRAD, "B": BACKWARD, "G": GRAD}
SOURCES = {"(": 7, "|": 7, "{": 8, "}": 8}


class Program:
    """Plays events, each of them a letter. Waits, calls, backward passes and steps take a second each.

    I waits for data, ``|`` is its end and ``(`` its begin, as ``}`` and ``{`` are of other data, F calls a model, N
    calls it without gradients, B is a backward pass, G returns gradients, S and s are steps of two optimizers, E
    switches to evaluation and T to training, C is a checkpoint, X a step that is skipped, ``~`` another optimizer in
    place of S, ``-`` ten seconds of something else. What stands between ``[`` and ``]`` is captured into a graph; R and
    r replay two graphs with a step in them. L is a step with a closure of F and B. f calls a model whose state is
    looked at, U updates it by hand and Z clears its gradients.
    """

    def __init__(self, **settings):
        self.clock = ManualClock()
        self.timer = Timer(clock=self.clock)
        self.loops = Loops(self.timer)
        self.loops.state_of = self._state_of
        vars(self.loops).update(settings)
        self.model = Model()
        self.optimizers = {one: Optimizer() for one in "SsXRrL"}
        self.captured = []

    def play(self, events):
        """Play the events on the calling thread."""
        loop = self.loops.here()
        for event in events.replace(" ", ""):
            does = {"I": "_wait", "|": "_end", "}": "_end", "R": "_replay", "r": "_replay"}
            does |= dict.fromkeys("SsL", "_step")
            getattr(self, does.get(event, "_other"))(loop, event)
        return self

    def _state_of(self, model, surely):
        def state():
            return model.updates, surely or model.cleared

        return state, state()

    def _wait(self, loop, _):
        state = loop.begin(IO)
        self.clock.advance(1)
        loop.end(state)

    def _end(self, loop, event):
        loop.end_of_data(loop.begin(IO), SOURCES[event])

    def _step(self, loop, event):
        loop.begin_step(self.optimizers[event])
        self.play("FB" if event == "L" else "")
        self.clock.advance(1)
        loop.end_step(self.optimizers[event])

    def _replay(self, loop, event):
        loop.begin_replay(self.optimizers[event])
        self.clock.advance(1)
        loop.end_replay(self.optimizers[event])

    def _other(self, loop, event):
        if event in CALLS:
            state = loop.begin(CALLS[event])
            self.clock.advance(1)
            if state >= 0:
                loop.end(state)
        elif event == "f":
            state = loop.begin_call(self.model)
            self.clock.advance(1)
            loop.end_call(self.model, state)
        elif event == "U":
            self.model.updates += 1
            self.clock.advance(1)
        elif event == "Z":
            self.model.cleared += 1
        elif event == "-":
            self.clock.advance(10)
        elif event == "~":
            self.optimizers["S"] = Optimizer()
        elif event == "[":
            self.captured.append(loop.begin_capture())
        elif event == "]":
            self.captured.append(loop.end_capture(self.captured.pop()))
        elif event in SOURCES:
            loop.begin_data(SOURCES[event], self.clock.now_ns())
        else:
            does = {"E": "begin_evaluation", "T": "end_evaluation", "C": "pause"}
            loop.skip_step(self.optimizers["S"]) if event == "X" else getattr(loop, does[event])()

    def spans(self, name):
        """The intervals of a region, in seconds from the beginning."""
        found = self.timer.intervals(name).tolist()
        return [(round((start - 10**9) / 1e9, 6), round((end - 10**9) / 1e9, 6)) for start, end in found]


def spans(events, name="BATCH"):
    """The intervals of a region after a program of these events has ended."""
    program = Program().play(events)
    program.loops.finish()
    return program.spans(name)


def lengths(events, name="BATCH"):
    """How long they are."""
    return [end - start for start, end in spans(events, name)]


@pytest.mark.parametrize(
    ("events", "batches"),
    [
        ("IFBS IFBS IFBS", [4, 4, 4]),
        ("FBS FBS FBS", [3, 3, 3]),
        ("I FBFB S I FBFB S", [6, 6]),
        ("IFB IFBS IFB IFBS", [7, 7]),
        ("IFBSS IFBSS", [5, 5]),
        ("IFBSSSS IFBSSSS IFBSSSS", [7, 7, 7]),
        ("FBSS FBSS", [4, 4]),
        ("IFBS FBs IFBS FBs", [7, 7]),
        ("FBS FBs FBS FBs", [6, 6]),
        ("FBS FBS FBS FBs FBs FBs", [3, 3, 6, 3, 3]),
        ("I FBs FBs FBs FBS I FBs FBs FBs FBS", [4, 3, 6, 4, 3, 6]),
        ("S S S", [1, 1, 1]),
        ("I L L L", [4, 3, 3]),
        ("FB L L FB L", [5, 3, 5]),
        ("INFBS INFBS", [5, 5]),
        ("INNFBS INNFBS", [6, 6]),
        ("I-FBS-IFBS", [14, 14]),
        ("IFBX IFBS IFBX", [3, 4, 3]),
        ("(II| - (IFBS IFBS| (II| (IFBS|", [4, 4, 4]),
        ("IFBS - (II| - IFBS", [4, 4]),
        ("N - (IFBS IFBS| -N - (IFBS| -NN - (IFBS", [4, 4, 4, 4]),
        ("FBS N(IFBS FBS", [3, 5, 3]),
        ("IFBS I(II|FBS IFBS", [4, 6, 4]),
        ("(I|FBS -- (I|FBS C - (I|FBS", [4, 4, 4]),
    ],
)
def test_a_step_ends_where_the_program_comes_round_again(events, batches):
    """Accumulation, several optimizers, skipped steps: one BATCH a round. Data that trains nothing is of none."""
    assert batches == lengths(events)


@pytest.mark.parametrize(
    ("events", "batches"),
    [
        ("FBS FBS ~ FBS FBS ~ FBS FBS", [3] * 6),
        ("FBS FBS ~ F E N FBS FBS", [3, 3, 5, 3]),
        ("FBS FBS -~ FBsS FBsS ~ FBsS", [3, 3, 14, 4, 4]),
        ("FBs FBs FBS FBs FBS ~ FBs FBS FBs", [3, 6, 6, 6, 3]),
    ],
)
def test_a_training_that_follows_another_without_a_loader(events, batches):
    """Its first step is no part of the other's last one, whose optimizer is gone; two that live step in turn."""
    assert batches == lengths(events)


@pytest.mark.parametrize(
    ("events", "batches", "validations"),
    [
        ("IFBS IFBS E ININ T IFBS", [4, 4, 4], [(8, 12)]),
        ("IFBS IFBS ININ IFBS", [4, 4, 4], [(8, 12)]),
        ("(IFBS IFBS| ININ| (IFBS|", [4, 4, 4], [(8, 12)]),
        ("(IFBS| IN| (IFBS|", [4, 4], [(4, 6)]),
        ("IFBS E N IFBS", [4, 4], [(4, 5)]),
        ("IFBS IFBS ININININ", [4, 4], [(8, 16)]),
        ("IFBS IFBS E INININ", [4, 4], [(8, 14)]),
        ("ININ IFBS IFBS", [4, 4], [(0, 4)]),
        ("E NNN T FBS FBS", [3, 3], [(0, 3)]),
        ("IFBS IFB ININ IFBS", [4, 11], [(7, 11)]),
        ("IFBS - ININ - IFBS", [4, 4], [(14, 18)]),
        ("IFBS E ININ C - T IFBS", [4, 4], [(4, 8)]),
        ("IFBS ININ C - IFBS", [4, 4], [(4, 8)]),
        ("IFBS E C - ININ T IFBS", [4, 4], [(14, 18)]),
        ("IFBS E ININ C - E ININ T IFBS", [4, 4], [(4, 8), (18, 22)]),
        ("IFBS E N C - N C - T IFBS", [4, 4], [(4, 16)]),
        ("IFBS I E ININ T FBS", [4, 3], [(5, 9)]),
    ],
)
def test_an_evaluation_however_it_is_written(events, batches, validations):
    """With ``eval()`` or without, between two steps, before the first one and at the end: it is no step."""
    assert (batches, validations) == (lengths(events), spans(events, "VALIDATION"))


@pytest.mark.parametrize(
    ("events", "validations", "epochs"),
    [
        ("(IFBS IFBS {-IENIEN | (ITFBS", [(8, 22)], [(0, 22), (22, 26)]),
        ("(IFBS IFBS {IENIEN - | (ITFBS", [(8, 22)], [(0, 22), (22, 26)]),
        ("(IFBS IFBS {IENNNINN | (ITFBS IFBS|", [(8, 15)], [(0, 15), (15, 23)]),
        ("(IFBS IFBS| {IENIEN} - (ITFBS", [(8, 22)], [(0, 8), (22, 26)]),
        ("(IFBS IFBS| {IENIEN} (-ITFBS IFBS|", [(8, 12)], [(0, 8), (12, 30)]),
        ("(IFBS IFBS| {IEN} (ITFBS IFBS|", [(8, 10)], [(0, 8), (10, 18)]),
        ("(IFBS IFBS| {IENIEN} {IENIEN} (ITFBS IFBS|", [(8, 12), (12, 16)], [(0, 8), (16, 24)]),
        ("(IFBS IFBS| E{ININ} {ININ} T (IFBS IFBS|", [(8, 16)], [(0, 8), (16, 24)]),
        ("(IFBS IFBS {IENTIENT - | (IFBS IFBS|", [(8, 12)], [(0, 22), (22, 30)]),
        ("(IFBS IFBS| {IENTIENT C - (IFBS IFBS|", [(8, 12)], [(0, 8), (22, 30)]),
        ("(IFBS IFBS {IENTIENT", [(8, 12)], []),
    ],
)
def test_an_evaluation_whose_step_says_so(events, validations, epochs):
    """It calls ``eval()`` behind its wait for data, as Ignite does, and may call ``train()`` too, as MONAI does."""
    assert (validations, epochs) == (spans(events, "VALIDATION"), spans(events, "EPOCH"))
    assert {4} == set(lengths(events))


@pytest.mark.parametrize(
    "events",
    ["E IFBS IFBS", "EN IFBS NIFBS", "INFBS INFBS INFBS", "IFBS EIFBS EIFBS", "INIFBS INIFBS INIFBS", "NFBS NFBS"],
)
def test_a_teacher_is_no_evaluation(events):
    """A model in evaluation that helps to train, or that trains itself in that mode."""
    assert [] == spans(events, "VALIDATION")


MANY = "N" * 10


@pytest.mark.parametrize(
    ("events", "region", "times", "batches"),
    [
        (f"E{MANY}T FBS E{MANY}T FBS E{MANY}T FBS", "generate", [10, 10, 10], [3, 13, 13]),
        (f"E{MANY}T FBSFBS E{MANY}T FBSFBS", "generate", [10, 10], [3, 3, 13, 3]),
        (f"I{MANY} FBS I{MANY} FBS I{MANY} FBS", "generate", [11, 10, 10], [14, 14, 14]),
        (f"IE{MANY}T FBS IE{MANY}T FBS", "generate", [10, 10], [3, 14]),
        (("N-" * 10 + "FBS" * 20) * 2, "rollout", [100, 100], None),
        ((f"E{'N-' * 10}T" + "FBS" * 20) * 2, "rollout", [100, 100], None),
    ],
)
def test_a_policy_that_generates(events, region, times, batches):
    """It is part of the step, and no evaluation: many calls without gradients in each round."""
    assert [] == spans(events, "VALIDATION")
    assert times == [pytest.approx(one, abs=10) for one in lengths(events, region)]
    assert batches is None or batches == lengths(events)


@pytest.mark.parametrize(
    "events", [(f"E{MANY}T" + "FBS" * 20) * 2, (MANY + "FBS" * 20) * 2, "ENT FBS" * 2, "ENNNNNNT FBS" * 2], ids=len
)
def test_a_policy_in_a_quick_environment(events, monkeypatch):
    """A package of environments is imported: calls that lie close together, or are few, are no evaluation either."""
    monkeypatch.setitem(sys.modules, "gymnasium", sys)
    assert ([], 2) == (spans(events, "VALIDATION"), len(spans(events, "rollout")))
    assert events.count("S") == len(spans(events))


def test_what_follows_a_rollout_is_none_of_it(monkeypatch):
    """An environment's steps are part of it until ``train()``; the time from there on is other code."""
    monkeypatch.setitem(sys.modules, "gymnasium", sys)
    events = "FBS" + "EN-T- FBS" * 3
    assert [11, 11, 11] == lengths(events, "rollout")
    assert [10, 10] == lengths(events, "other code")


@pytest.mark.parametrize("call", ["N", "N-", "EN"])
def test_a_long_rollout_before_the_first_update(call, monkeypatch):
    """Its calls are no steps, however many there are before an optimizer is seen."""
    monkeypatch.setitem(sys.modules, "gymnasium", sys)
    events = (call * 1500 + "T" + "FBS" * 20) * 2
    assert (40, 2) == (len(spans(events)), len(spans(events, "rollout")))
    assert 1500 == len(spans(call * 1500))


@pytest.mark.parametrize(
    ("events", "validations"),
    [
        ((f"E{MANY}T" + "FBS" * 20) * 3, [(0, 10), (70, 80), (140, 150)]),
        (("FBS" * 20 + MANY) * 2 + "FBS" * 20, [(60, 70), (130, 140)]),
        ("FBS" * 40 + MANY + "FBS" * 20, [(120, 130)]),
        ("FBS" + MANY + "FBS" * 59, [(3, 13)]),
    ],
)
def test_an_evaluation_of_many_calls_now_and_then(events, validations):
    """Without a loader, in none of the steps before it or every twenty, with ``eval()`` or without: no policy."""
    assert validations == spans(events, "VALIDATION")
    assert [] == spans(events, "generate")
    assert [3] * 60 == lengths(events)


@pytest.mark.parametrize(
    ("events", "epochs"),
    [
        ("(IFBS IFBS| (IFBS IFBS|", [(0, 8), (8, 16)]),
        ("(IFBS IFBS| -- (IFBS IFBS|", [(0, 8), (28, 36)]),
        ("(I IFBS |FBS -- (I IFBS |FBS", [(0, 8), (28, 36)]),
        ("(IFBS IFB |( IFBS IFBS|", [(0, 11), (11, 15)]),
        ("(IFBS| IN| (IFBS|", [(0, 4), (6, 10)]),
        ("(IFBS| (IFBS IFBS INN", [(0, 4), (4, 12)]),
        ("(IFBS IFBS", []),
        ("(I|FBS -- (I|FBS -- (I|FBsS", [(0, 4), (24, 28), (48, 53)]),
        ("(I|FBS E(I|NT (I|FBS EN C T (I|FBS", [(0, 4), (6, 10), (11, 15)]),
        ("(I| - (IFBS IFBS| (II| FBS FBS (I| FBS FBS (I|", [(11, 19)]),
    ],
)
def test_an_epoch_ends_with_its_last_step(events, epochs):
    """Also where the data has ended before, as with a loader that fetches one batch ahead."""
    assert epochs == spans(events, "EPOCH")


@pytest.mark.parametrize("before", ["F", "FF-", "EF T"])
def test_a_call_before_the_first_epoch_prepares_it(before):
    """As of a frozen model, for what each step is compared with: it is no part of the first step."""
    program = Program().play(f"{before} (IFBS IFBS|")
    program.loops.finish()
    ((start, end),) = program.spans("EPOCH")
    assert [(start, start + 4), (start + 4, end)] == program.spans("BATCH")


def test_the_pause_after_the_last_step_is_no_steps():
    """Between epochs, of a plain loader and of one that is a batch ahead."""
    assert [4, 4, 4, 4] == lengths("(IFBS IFBS| -- (IFBS IFBS|")
    assert [5, 3, 5, 3] == lengths("(I IFBS |FBS -- (I IFBS |FBS")


def test_what_came_before_a_trainer_is_complete():
    """Its last epoch and its last step, which are only known to have ended when something else begins."""
    program = Program().play("(IFBS IFBS| (IFBS IFBS|")
    program.loops.leave(frozenset({"BATCH", "EPOCH"}))
    assert [(0, 8), (8, 16)] == program.spans("EPOCH")
    program = Program().play("FBS FBS")
    program.loops.leave(frozenset({"BATCH"}))
    assert [(0, 3), (3, 6)] == program.spans("BATCH")


def test_a_checkpoint_is_no_part_of_a_step():
    """Its time is no BATCH's."""
    assert [4, 4] == lengths("IFBS C - IFBS")


@pytest.mark.parametrize(
    ("events", "batches"),
    [
        ("IG" * 30, [2] * 30),
        ("IFB" * 30, [3] * 30),
        ("B-" * 30, [11] * 29 + [1]),
        ("FB" * 30, [2] * 30),
        ("IN" * 30, [2] * 30),
        ("N" * 15, [1] * 15),
        ("IG" * 3, []),
        ("G" * 300, []),
        ("NGGGG" * 9, []),
    ],
    ids=lambda one: one[:5] if isinstance(one, str) else "",
)
def test_rounds_without_an_optimizer(events, batches):
    """From one wait for data to the next, or from one call to the next of the same."""
    assert batches == [pytest.approx(one, abs=1e-8) for one in lengths(events)]


@pytest.mark.parametrize(
    ("events", "batches", "validations"),
    [
        ("(" + "IG" * 25 + "| (ININ| (" + "IG" * 5 + "|", [2] * 30, [(50, 54)]),
        ("IG" * 25 + "IN" * 5, [2] * 25, [(50, 60)]),
        ("FB" * 25 + "ENNNT" + "FB" * 5, [2] * 30, [(50, 53)]),
        ("FB" * 25 + "N", [2] * 25, []),
    ],
    ids=["between epochs", "at the end", "without a loader", "a last call"],
)
def test_an_evaluation_among_rounds_without_an_optimizer(events, batches, validations):
    """It is no step, and no part of one."""
    found = [pytest.approx(one, abs=1e-8) for one in lengths(events)]
    assert (batches, validations) == (found, spans(events, "VALIDATION"))


def test_the_times_between_events_without_an_optimizer():
    """Those before the round and the last one's are known too, but for the update after it."""
    assert [10] * 29 == lengths("IG-" * 30, "other code")
    assert [10] * 29 == lengths("B-" * 30, "other code")


def test_a_step_has_its_only_event_inside():
    """Where both begin and end together, too."""
    for events in ("SSS", "RRR", "B" * 30):
        program = Program().play(events)
        program.loops.finish()
        tree = program.timer.snapshot(places=True).tree
        assert [one.name for one in tree.roots] == ["BATCH"], events
        assert not [one.total_s for one in tree.walk() if one.is_rest], events
    # A log may know the event first: then the lengths tell.
    program = Program().play("SSS")
    program.loops.finish()
    (batch, _), (step, _) = (program.timer.intervals(name)[0].tolist() for name in ("BATCH", "optimizer"))
    assert batch < step


@pytest.mark.parametrize(
    ("events", "batches"), [("fBUfBUfB", 3), ("fBfBUfBfBUfBfB", 3), ("fBfBUfBfBUfB", 2), ("fBZfBZfB", 3)]
)
def test_the_last_update_by_hand(events, batches):
    """It may change nothing that is looked at: then it comes after as many passes as the one before it."""
    assert batches == len(lengths(events))


@pytest.mark.parametrize(
    ("events", "batches"),
    [
        ("fBS" * 5 + "fBU" * 10, [3] * 14 + [2]),
        ("IfBS" * 5 + "IfBU" * 10, [4] * 14 + [3]),
        ("fBfBS" * 5 + "fBU" * 10, [5] * 5 + [3] * 9 + [2]),
        ("fBU" * 10 + "fBS" * 5, [3] * 15),
        ("IfBU" * 10 + "IfBS" * 5, [4] * 15),
        ("fBS" * 5 + "fBU" * 10 + "fBS" * 5, [3] * 20),
    ],
    ids=["one after the other", "with data", "accumulated before", "the other way round", "with data, too", "again"],
)
def test_updates_by_hand_before_and_after_an_optimizer(events, batches):
    """Each is a step, though an optimizer of PyTorch has told of its steps before."""
    assert batches == lengths(events)


@pytest.mark.parametrize(
    ("events", "batches"),
    [
        ("fBS" * 3 + "fB" * 9, 3),
        ("fBS" * 3 + "ZfB" * 9, 3),
        ("IfBS" * 3 + "IZfB" * 9 + "IfBS", 4),
        ("fBS fBfBfBfBS fBfBS", 3),
        ("fBSZ fBZfBZfBZfBSZ fBS", 3),
        ("fBUfBS" * 3, 3),
    ],
)
def test_no_updates_by_hand(events, batches):
    """Where an optimizer told of its steps, backward passes that change no parameter are none."""
    assert batches == len(lengths(events))


def test_an_optimizer_after_rounds_without_one():
    """From the first step on an optimizer says where a step ends."""
    assert [4, 4] == lengths("ING" * 25 + "IFBS IFBS")[-2:]


@pytest.mark.parametrize(
    ("events", "batches", "captured"),
    [
        ("FBS FBS [FBS] RRR", [3, 3, 1, 1, 1], [True]),
        ("IFBS [FBS] I-R I-R I-R", [4, 12, 12, 12], [True]),
        ("FBS [FBS] [FBs] Rr Rr Rr", [3, 2, 2, 2], [True, True]),
        ("[FB] [N] FBS FBS", [3, 3], [False, False]),
        ("IFBS [FBS] IR IR E ININ T IR", [4, 2, 2, 2], [True]),
        ("[FBS] IFBR IFBR", [4, 4], [True]),
    ],
)
def test_a_replay_of_a_captured_step_is_a_step(events, batches, captured):
    """Captured work does not run; each replay of the graph does."""
    program = Program().play(events)
    program.loops.finish()
    assert (batches, captured) == ([end - start for start, end in program.spans("BATCH")], program.captured)
    assert events.count("R") + events.count("r") == len(program.spans("graph replay"))


def test_the_times_between_events():
    """They lie inside their BATCH, and those of an evaluation are none of it."""
    events = "I-F-B-S- I-F-B-S- I-N-I-N- I-F-B-S"
    assert [10, 10, 10] == lengths(events, "prepare batch") == lengths(events, "loss") == lengths(events, "gradients")
    assert [10] == lengths(events, "between steps")
    assert [] == lengths(events, "other code")


def test_a_step_needs_no_memory():
    """A list of the times between events, made at each of these, took three times as long as all else."""
    program, peaks = Program().play("I-F-B-S-" * 20), []
    for _ in range(3):  # what other threads of the test run need meanwhile only ever adds
        tracemalloc.start()
        program.play("I-F-B-S-")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < 4096


def test_each_thread_has_its_own_state(in_thread):
    """A thread that acts, evaluates or trains as well changes nothing in the loop that trains."""
    program = Program().play("IFBS")
    loop = program.loops.here()
    state = loop.begin(FORWARD)
    in_thread(program.play, "EN FBS IN NNNNNNNNN FBS")
    loop.end(state)
    program.play("BS IFBS")
    program.loops.finish()
    assert 3 == len(program.spans("BATCH"))
    assert [(0, 4), (4, 24)] == program.spans("BATCH")[:2]
    assert 5 == len(program.spans("FORWARD"))
    assert [] == program.spans("VALIDATION")


def test_a_thread_that_ends_leaves_the_steps_to_the_next(in_thread):
    """One training after the other, each in its own thread."""
    program = Program()
    for _ in range(2):
        in_thread(program.play, "IFBS IFBS I")
    assert 4 == len(program.spans("BATCH"))


def test_an_actor_before_the_first_step(in_thread):
    """A thread that calls a model before the loop begins is not taken for it."""
    program = Program()
    in_thread(program.play, "NNN")
    program.play("IFBS IFBS I")
    assert [(3, 7), (7, 11)] == program.spans("BATCH")


def test_a_thread_of_the_framework(in_thread):
    """It runs parts of a backward pass: its calls is part of that."""
    engine = []
    program = Program(is_engine=lambda: threading.get_ident() in engine)
    program.play("IF")

    def run():
        engine.append(threading.get_ident())
        program.play("F B")
        loop = program.loops.here()
        loop.begin_step(program)
        loop.end_step(program)

    loop = program.loops.here()
    state = loop.begin(BACKWARD)
    in_thread(run)
    program.clock.advance(1)
    loop.end(state)
    program.play("IF")
    assert 2 == len(program.spans("FORWARD"))
    assert [(0, 5)] == program.spans("BATCH")  # the optimizers that stepped in the backward pass


@pytest.mark.parametrize(
    ("events", "times"),
    [
        *[("FBS~" * 30, 0), (("FBS" * 12 + "~") * 3, 2), ("FBS" * 5 + "~FBS", 0), ("FBS FBs" * 12, 0)],
        *[([1] * 12 + [2] * 9, 1), ([1, 2] * 12, 0), ([*range(30)], 0)],
    ],
)
def test_another_training_is_told_to_the_run(events, times, tmp_path, monkeypatch):
    """A few steps are a part of the next one; two optimizers in turn, or a new one in each step, are one training."""
    told, program = [], Program()
    monkeypatch.setattr(RunLog, "event", lambda _, what: told.append(what))
    with RunLog(tmp_path, program.timer, flush_s=None):
        if isinstance(events, str):
            program.play(events)
        else:  # the calls of compiled steps
            for number, ident in enumerate(events):
                program.loops.here().add_unnamed(STEP, ident, 2 * number + 1, 2 * number + 2)
    assert ["training"] * times == told
