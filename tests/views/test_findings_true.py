"""Findings that are silent where the program is as it must be, and remedies that can help."""

from __future__ import annotations

import random

import pytest
from made_runs import made_rank

from deep500_timing._views.findings import evidence_of, find, notes_of
from deep500_timing._views.findings._evidence import Evidence
from deep500_timing._views.findings._finding import Finding, longer
from deep500_timing.runs import Run

MS = 1e-3
OUTSIDE = "PREDICT", "TEST", "optimizer (not jitted)", "gradient (not jitted)"
EAGER = "jnp.tanh(x)", "jax.random.normal(key)", "logsumexp(x)\nmax\tjax/_src/numpy/reductions.py"
NOT_EAGER = "np.tanh(x)", "jnp.asarray(x)", "jax.device_put(x)\nshard_args\tjax/_src/pxla.py"
OF_FLAX = "step(x)\nJitWrapped.__call__\tflax/nnx/compilation.py"


def step(made, calls=1, **parts):
    """A step: FORWARD so many times, then what else is named, in ms."""
    with made.region("BATCH"):
        for _ in range(calls):
            made.spend("FORWARD", 3 * MS)
        made.spend("BACKWARD", 4 * MS)
        for name, took in parts.items():
            made.spend(name.replace("_", " "), took * MS)


def step_of(made, calls):
    """The passes of a step, so many times."""
    for _ in range(calls):
        made.spend("FORWARD", 1 * MS)
        made.spend("BACKWARD", 2 * MS)


@pytest.fixture
def found(tmp_path):
    """Gives the findings of a run that a function writes, by rule."""

    def of(write, **settings):
        with made_rank(tmp_path / "run", **settings) as made:
            write(made)
        with Run.open(tmp_path / "run") as run:
            return {one.rule: one for one in find(run)}

    return of


@pytest.mark.parametrize(
    ("rule", "calls", "most_ms"),
    [
        ("spikes", lambda n: 30 if n % 16 == 9 else 1, 1),
        ("spikes", lambda n: random.Random(n).choice((1, 2, 40)), 1),
        ("warm-up", lambda n: 400 if n == 0 else 1, 1),
        ("spikes", lambda n: 1, 100),
    ],
)
def test_a_step_that_holds_an_episode_is_not_slow(found, rule, calls, most_ms):
    """Steps that call the model more often do more, also the first one; one that takes as long with as many is slow."""
    write = lambda made: [step(made, calls(n), other=most_ms if n % 16 == 9 else 1) for n in range(160)]  # noqa: E731
    assert (most_ms > 1) == (rule in found(write))


def test_spikes_of_a_tenth_of_a_second_in_all_are_none(found):
    """Nobody waits for three steps that take five times as long as others of 8 ms."""
    assert "spikes" not in found(lambda made: [step(made, other=34 if n in (40, 80, 120) else 1) for n in range(160)])


@pytest.mark.parametrize(
    ("name", "remedy", "command"), [("compile", "cache compilation", ""), ("other", "leave the first steps out", " 0")]
)
def test_only_what_compiles_is_cached(found, name, remedy, command):
    """The remedy of a warm-up is of its content; where nothing compiles, `why` tells what the first step does."""
    write = lambda made: [step(made, **{name: 900 if n == 0 else 1}) for n in range(60)]  # noqa: E731
    one = found(write)["warm-up"]
    assert one.remedy.startswith(remedy)
    assert one.command.startswith("deep500-timing why ") is bool(command)
    assert one.command.endswith(command)


@pytest.mark.parametrize(
    ("reason", "failures", "lost"),
    [("KeyboardInterrupt", 1, False), ("SIGTERM", 1, False), ("ValueError", 1, True), ("KeyboardInterrupt", 2, True)],
)
def test_what_the_user_stops_is_not_lost(tmp_path, reason, failures, lost):
    """The region that was open when the program was stopped has failed, and that is no loss."""
    with made_rank(tmp_path / "run") as made:
        for _ in range(failures):
            with pytest.raises(KeyboardInterrupt), made.region("IO"):
                raise KeyboardInterrupt
        for _ in range(30):
            step(made)
        made.log.close(reason=reason)
    with Run.open(tmp_path / "run") as run:
        assert lost == any(one.rule == "lost" for one in find(run))


@pytest.mark.parametrize("method", ["Net.forward", "Env.step", "forward"])
@pytest.mark.parametrize("row", ["prepare batch", "optimizer", "GC"])
def test_a_row_that_holds_a_model_is_not_blamed(found, method, row):
    """Its lines lie in the forward of a module, in which a collection may begin as well: that is blamed."""

    def write(made):
        for _ in range(60):
            with made.region("BATCH"):
                made.spend("FORWARD", 2 * MS)
                made.spend("BACKWARD", 2 * MS)
                with made.region(row):
                    made.wait(3 * MS)
                    made.log.add("stacks", (made.clock.now_ns(), f"{method}\ttrain.py:9\tself.conv(x)"))
                    made.wait(3 * MS)

    assert (method != "Net.forward" or row == "GC") == ("dominant-region" in found(write, stacks_s=0.02))


@pytest.mark.parametrize(
    ("line", "remedy"),
    [(line, "gc.freeze() after the first step") for line in ("", "[x]")] + [("gc.collect()", "call gc.collect() less")],
)
@pytest.mark.parametrize("every", [1, 2, 3, 15])
def test_collections_are_one_cause_in_all_regions(found, every, line, remedy):
    """They begin wherever an object is made. That line is no cause, unless it asks for them; few are slow steps."""

    def write(made):
        for step in range(90):
            with made.region("BATCH"):
                for name in ("FORWARD", "BACKWARD", "optimizer"):
                    with made.region(name):
                        made.wait(5 * MS)
                        if step % every == 0:
                            with made.region("GC"):
                                for _ in range(every):
                                    if line:
                                        made.log.add("stacks", (made.clock.now_ns(), f"f\ttrain.py:9\t{line}"))
                                    made.wait(2 * MS)

    by_rule = found(write, stacks_s=0.02)
    one = by_rule["dominant-region" if every < 15 else "spikes"]
    assert by_rule.keys() == {one.rule}
    assert remedy in one.help
    assert ("train.py:9" in one.text) == ("collect(" in line)
    assert one.rule == "spikes" or one.fact.startswith("GC takes 29 % of BATCH, 6.00 ms a step")


@pytest.mark.parametrize("lines", [1, 2])
@pytest.mark.parametrize("inner", [*EAGER, *NOT_EAGER, OF_FLAX])
def test_operations_of_jax_outside_of_jit(found, inner, lines):
    """They have a remedy, where other code has parts that may be timed. Copies and calls of a library are none."""

    def write(made):
        for number in range(60):
            with made.region("BATCH"):
                made.spend("jit(step)", 2 * MS)
                made.wait(3 * MS)
                said = "x.sort()" if number % lines else inner
                made.log.add("stacks", (made.clock.now_ns(), f"make\ttrain.py:{9 - number % lines}\t{said}"))
                made.wait(3 * MS)

    one = found(write, stacks_s=0.02)["unnamed"]
    assert (inner in EAGER, inner == OF_FLAX) == (one.remedy.startswith("jax.jit"), one.remedy.startswith("Flax"))
    assert "(train.py:9)" in one.text


@pytest.mark.parametrize(
    ("mib", "samples", "speaks"), [(150, 12, True), (150, 9, False), (20, 12, False), (-150, 12, False)]
)
def test_a_gigabyte_is_said_soon(found, mib, samples, speaks):
    """A growth of a gigabyte needs half the samples of a smaller one."""

    def write(made):
        for number in range(samples):
            made.log.sample("memory.host_rss_bytes", float((4000 + mib * number) << 20))
            for _ in range(10):
                step(made)

    assert speaks == ("memory-grows" in found(write))


def test_a_checkpoint_at_each_step_is_told_with_its_period(found):
    """It is the commonest mistake about checkpoints, and the easiest to mend."""

    def write(made):
        for _ in range(60):
            step(made)
            made.spend("CHECKPOINT", 2 * MS)

    assert found(write)["outside-steps"].remedy.startswith("do it once in 14 steps (then 2.0 %)")


@pytest.mark.parametrize(
    ("name", "times", "says"), [("CHECKPOINT", 1, ""), ("CHECKPOINT", 2, "do it"), ("logging", 1, "")]
)
def test_a_checkpoint_that_is_made_once_is_no_finding(found, name, times, says):
    """Nothing can be made rarer; of two the second may be left out."""

    def write(made):
        for number in range(60):
            step(made)
            if number % 30 == 29 and number // 30 < times:
                made.spend(name, 40 * MS / times)

    remedies = [one.remedy for rule, one in found(write).items() if rule == "outside-steps"]
    assert bool(says) == bool(remedies)
    assert all(one.startswith(says) for one in remedies)


@pytest.mark.parametrize(
    ("name", "calls", "remedy"),
    [
        ("optimizer", 3, "a smaller history_size"),
        ("optimizer", 1, "time its parts"),
        ("their step", 3, "time its parts"),
        ("FIT", 3, "time its parts"),
    ],
)
def test_an_optimizer_with_a_closure_is_not_to_be_divided(found, name, calls, remedy):
    """What lies between the calls of L-BFGS's closure is the optimizer's own; a closure of SGD is the program's."""

    def write(made):
        for _ in range(60):
            with made.region("BATCH"), made.region(name):
                step_of(made, calls)
                made.clock.advance(2 * calls * MS)

    assert found(write)["unnamed"].remedy.startswith(remedy)


@pytest.mark.parametrize(("name", "remedy"), [("VALIDATION", "do it once in 10 steps (then 10 %)"), ("env", "")])
def test_an_evaluation_after_each_step_can_be_rarer(found, name, remedy):
    """As it is after each epoch of a single batch. What else each step needs can only be faster."""

    def write(made):
        for _ in range(60):
            step(made)
            made.spend(name, 8 * MS)

    assert (remedy or "run it in parallel") in found(write)["outside-steps"].remedy


def test_a_compilation_is_not_its_parents_time(found):
    """FORWARD (no grad) that compiled once is not computed too often."""

    def write(made):
        for number in range(60):
            with made.region("BATCH"):
                step_parts = {"FORWARD": 3, "BACKWARD": 4}
                for name, took in step_parts.items():
                    made.spend(name, took * MS)
                with made.region("FORWARD (no grad)"):
                    made.wait(1 * MS)
                    if number == 30:
                        made.spend("compile", 2)

    assert "dominant-region" not in found(write)


def test_the_time_of_our_own_clock_is_nobodys(found):
    """Between regions of some hundred ns the rest is mostly what reading the clock takes."""

    def write(made):
        for _ in range(20_000):
            with made.region("BATCH"):
                for name in "abcdefgh":
                    made.spend(name, 30e-9)
                    made.wait(80e-9)

    assert "unnamed" not in found(write)


def test_what_ends_each_epoch_is_told_once_with_all_its_time(found):
    """The last epoch's end counts too, so the bound is one."""

    def write(made):
        for _ in range(4):
            with made.region("EPOCH"):
                for _ in range(20):
                    step(made)
                made.spend("CALLBACKS", 1)

    by_rule = found(write)
    assert ["outside-steps"] == list(by_rule)
    assert by_rule["outside-steps"].gain_s == pytest.approx(4)


def test_a_line_is_one_finding(found):
    """A call of `predict` with set-up in no region: it costs both, and is named once."""

    def write(made):
        def wait(seconds):
            for _ in range(4):
                made.wait(seconds / 4)
                made.log.add("stacks", (made.clock.now_ns() - 1, "<module>\ttrain.py:9\tmodel.predict(x)"))

        with made.region("FIT"):
            for _ in range(40):
                step(made)
                wait(20 * MS)
                with made.region("PREDICT"):
                    wait(10 * MS)

    by_rule = found(write, stacks_s=0.02)
    assert ["unnamed"] == list(by_rule)
    assert by_rule["unnamed"].gain_s == pytest.approx(40 * 30 * MS, rel=0.01)


def test_what_a_region_does_is_not_counted_beside_it(found):
    """An evaluation with lines in no region: its rest is a part of what it takes."""

    def write(made):
        for _ in range(40):
            step(made)
            with made.region("VALIDATION"):
                for part in range(6):
                    (made.wait if part > 3 else lambda seconds: made.spend("FORWARD (no grad)", seconds))(6 * MS)
                    made.log.add("stacks", (made.clock.now_ns() - 1, "<module>\ttrain.py:9\tscore(model(x))"))

    by_rule = found(write, stacks_s=0.02)
    assert ["outside-steps"] == list(by_rule)
    assert by_rule["outside-steps"].gain_s == pytest.approx(40 * 36 * MS, rel=0.01)


def fit(made, first):
    """A fit of Keras with first batches that, and no others, trace."""
    made.log.declare("compilations", unix_us="int", dur_us="int", compile_id="name", frame="name", reason="name")
    for number in range(60):
        if number in first:
            reason = "a batch of another shape" if number else ""
            made.log.add("compilations", (number, 200_000, str(number), "the train step of fit", reason))
            made.log.add("compilations", (number + 1, 150_000, "", "step", "a shape that JAX does not know"))
        with made.region("BATCH"):
            made.spend("compile" if number in first else "IO", (200 if number in first else 1) * MS)
            made.wait(9 * MS)


@pytest.mark.parametrize("name", [*OUTSIDE, "IO", "jit(step)"])
def test_a_prediction_in_each_step_is_no_part_of_it(found, name):
    """Though nothing else divides the step; a wait for data is another rule's."""

    def write(made):
        for _ in range(40):
            with made.region("BATCH"):
                made.wait(2 * MS)
                made.spend(name, 18 * MS)

    by_rule = found(write)
    assert (name in OUTSIDE) == ("dominant-region" in by_rule)
    if name in OUTSIDE:
        assert f"{name} takes 90 % of BATCH, 18.0 ms a step" == by_rule["dominant-region"].fact
        assert not by_rule["dominant-region"].where


@pytest.mark.parametrize(("name", "told"), [("jit(step)", set()), ("wait for device", set()), ("compile", {"spikes"})])
@pytest.mark.parametrize("is_slow", [lambda n: n % 50 == 49, lambda n: n >= 32])
def test_a_queue_of_jax_makes_no_slow_steps(found, is_slow, name, told):
    """A call returns before the device has computed, until the queue is full or something waits for a result."""

    def write(made):
        for n in range(400):
            with made.region("BATCH"):
                made.spend("jit(step)", 1 * MS)
                made.spend(name, (90 if is_slow(n) else 1) * MS)

    levels = {"level-shift"} if told and is_slow(399) and is_slow(398) else told
    assert levels == found(write).keys() & {"spikes", "level-shift", "drift"}


@pytest.mark.parametrize(("waits", "told"), [((3000, 20, 20), False), ((3000,), False), ((400, 400, 400), True)])
def test_an_evaluation_in_jax_does_not_cost_what_the_queue_of_the_training_does(found, waits, told):
    """The first wait in it is for that too."""

    def write(made):
        for _ in range(100):
            made.spend("BATCH", 10 * MS)
        with made.region("VALIDATION"):
            for wait in waits:
                made.spend("wait for device", wait * MS)
        made.spend("BATCH", 10 * MS)

    assert told is any("VALIDATION" in one.fact for one in found(write).values())


@pytest.mark.parametrize(
    ("eager", "could_jit", "step_ms", "said"),
    [(0, 1, 5, "jit_compile=False"), (0, 1, 50, ""), (0, 0, 5, ""), (1, 0, 50, "run_eagerly=True")],
)
def test_what_a_model_of_keras_runs_without_is_said_by_name(found, eager, could_jit, step_ms, said):
    """A graph always helps; XLA may, where a step is many small operations."""

    def write(made):
        made.log.declare("fits", unix_us="int", backend="name", data="name", eager="int", could_jit="int")
        made.log.add("fits", (1, "tensorflow", "arrays", eager, could_jit))
        for _ in range(60):
            made.spend("BATCH", step_ms * MS)

    facts = [finding.fact for rule, finding in found(write).items() if rule == "runs-eagerly"]
    assert [said] * bool(said) == [said for fact in facts if said in fact] == [said] * len(facts)


@pytest.mark.parametrize(
    ("name", "part_ms", "is_said"), [("optimizer", 4, True), ("optimizer", 40, False), ("tf.function", 4, False)]
)
def test_a_loop_of_tensorflow_outside_of_a_graph(found, monkeypatch, name, part_ms, is_said):
    """Its steps of small operations are told to become one function; large ones gain little."""
    monkeypatch.setattr(Evidence, "kinds", ("tensorflow",))

    def write(made):
        for _ in range(60):
            with made.region("BATCH"):
                made.spend(name, part_ms * MS)

    assert is_said == (found(write).get("runs-eagerly", Finding).remedy == "tf.function around the step")


MAIN = "<module>\ttrain.py:9\tmodel.fit(data)\nfit\tkeras/trainer.py"


@pytest.mark.parametrize("first_ms", [[4000], [3000, 900], [4000, 900, *[5] * 9]])
def test_a_long_compilation_at_the_begin_is_the_start(found, first_ms):
    """Though several steps after it are slow as well, it is told of the few that hold nearly all of it."""

    def write(made):
        for step in range(40):
            made.spend("BATCH", (first_ms[step] if step < len(first_ms) else 1 + 2 * (step < 12)) * MS)

    fact = found(write)["warm-up"].fact
    assert "is warm-up: the first " in fact
    assert "% longer" not in fact


@pytest.mark.parametrize(("every", "long_ms"), [(32, 1500), (50, 400), (20, 200)])
def test_a_busy_machine_does_not_hide_the_period_of_long_pauses(found, every, long_ms):
    """An evaluation in the loop is told with its period, though other steps are slow as well."""
    dice = random.Random(0)

    def write(made):
        for step in range(320):
            made.spend("BATCH", (long_ms if step % every == every - 1 else 6 if dice.random() < 0.06 else 1) * MS)

    assert f"every {every} steps" == found(write)["spikes"].where


@pytest.mark.parametrize(
    ("backend", "part"),
    [("tensorflow", "IO"), ("torch", "compile"), ("jax", "jit(s)"), ("torch", "FORWARD"), ("", "FORWARD")],
)
def test_how_a_step_of_keras_is_divided_is_said_where_nothing_does(tmp_path, backend, part):
    """In place of a rest of 98 %; on JAX nothing divides it; what PyTorch does besides is no matter of `fit`'s line."""
    with made_rank(tmp_path / "run", stacks_s=0.02) as made:
        made.log.declare("fits", unix_us="int", backend="name", data="name", eager="int", could_jit="int")
        if backend:  # otherwise another trainer's, such as Lightning's
            made.log.add("fits", (1, backend, "arrays", 0, 0))
        for _ in range(30):
            with made.region("FIT"), made.region("BATCH"):
                made.spend(part, 1 * MS)
                made.wait(4 * MS)
                made.log.add("stacks", (made.clock.now_ns(), "<module>\ttrain.py:9\tmodel.fit(x, y)"))
                made.wait(5 * MS)
    with Run.open(tmp_path / "run") as run:
        assert (part in ("IO", "compile")) == (
            "phases=True" in dict(notes_of(evidence_of(run), says_start=False)).get("BATCH", "")
        )
        said = [(one.why, one.remedy.partition(";")[0]) for one in find(run) if one.rule == "unnamed"]
    place = "100 % of it in <module> (train.py:9): model.fit(x, y)"
    assert [("", "larger batches") if backend else (place, "time its parts as regions")] * (part == "FORWARD") == said


@pytest.mark.parametrize("own_ms", [1, 5])
@pytest.mark.parametrize("name", ["VALIDATION", "sampling"])
def test_the_parts_of_a_short_evaluation_are_no_finding(found, name, own_ms):
    """Its loss lies in no region, and is for no reader before the evaluation itself is a finding."""

    def write(made):
        for _ in range(40):
            step(made)
            with made.region(name):
                made.spend("FORWARD", own_ms * MS)
                made.wait(own_ms * MS)

    assert (name == "sampling" or own_ms == 5) == ("unnamed" in found(write))


@pytest.mark.parametrize("ended", [0, 2])
@pytest.mark.parametrize("around", [("FIT", "EPOCH"), ("FIT",), ("EPOCH",)], ids=str)
def test_a_program_that_is_stopped_inside_a_region_is_not_said_to_lie_outside_all(found, around, ended):
    """The regions that were open have no time, or that of those before them alone."""

    def write(made):
        for number in range(ended + 1):
            for name in around:
                made.tmr.start(name)
            for _ in range(60):
                made.spend("BATCH", 10 * MS)
            for name in reversed(around) if number < ended else ():
                made.tmr.end(name)

    assert [] == [one.fact for one in found(write).values() if "outside every region" in one.fact]


@pytest.mark.parametrize(("factor", "said"), [(1.37, "37 % longer"), (4.9, "390 % longer"), (774.9, "775 × as long")])
def test_a_share_of_several_hundred_percent_is_a_factor(factor, said):
    """Nobody reads "77390 % longer"."""
    assert said == longer(factor)


@pytest.mark.parametrize(
    ("maker", "backend", "said"),
    [
        ("call\tscript_ops.py\ndecode\tdata.py:2\ttime.sleep(1)", "tensorflow", "decode (data.py:2)"),
        ("call\tscript_ops.py\nread\tdata.py:7\topen(name)", "tf_keras", "read (data.py:7)"),
        ("", "tensorflow", "a Python generator makes"),
        ("", "jax", "<module> (train.py:9)"),
    ],
)
def test_a_wait_for_data_names_the_line_that_makes_it(found, maker, backend, said):
    """TensorFlow runs a generator on a thread of its own: the line at which the main thread waits says nothing."""

    def write(made):
        made.log.declare("fits", unix_us="int", backend="name", data="name", eager="int", could_jit="int")
        made.log.declare("maker_stacks", time_ns="time", stack="name")
        made.log.add("fits", (1, backend, "generator", 0, 0))
        for _ in range(60):
            with made.region("BATCH"):
                with made.region("IO"):
                    made.wait(5 * MS)
                    made.log.add("stacks", (made.clock.now_ns(), MAIN))
                    if maker:
                        made.log.add("maker_stacks", (made.clock.now_ns(), maker))
                    made.wait(5 * MS)
                made.wait(5 * MS)

    assert said in found(write)["waits-for-data"].why


@pytest.mark.parametrize("name", ["rollout", "generate"])
@pytest.mark.parametrize("every", [1, 20])
def test_a_policy_that_acts_is_no_forward_pass(found, name, every):
    """Though it calls a model; it is told first, and not as slow steps, where it fills some steps."""

    def write(made):
        for step in range(200):
            with made.region("BATCH"):
                if step % every == 0:
                    with made.region(name):
                        for _ in range(3):
                            made.spend("FORWARD (no grad)", every * MS)
                            made.wait(2 * every * MS)
                made.spend("FORWARD", 0.5 * MS)
                made.spend("BACKWARD", 0.5 * MS)

    by_rule = found(write)
    assert "dominant-region" == next(iter(by_rule))
    assert f"{name} takes 90 % of BATCH" in by_rule["dominant-region"].fact


@pytest.mark.parametrize(
    ("first", "rules"),
    [([0], {"warm-up"}), ([0, 3, 7, 20, 41], {"warm-up", "recompilation"}), ([3, 7, 20], {"recompilation"})],
)
def test_batches_that_trace_are_told_once(found, first, rules):
    """The first is the start; those that come with each new shape are recompilations, and no slow steps too."""
    by_rule = found(lambda made: fit(made, first))
    assert rules == {"warm-up", "recompilation", "spikes"} & by_rule.keys()
    again = sum(number > 0 for number in first)
    assert "recompilation" not in rules or by_rule["recompilation"].fact.startswith(f"{again} recompilations")


def recompiled(row_of):
    """Sixty steps, five of which compile again, with a row of each."""

    def write(made):
        made.log.declare("compilations", unix_us="int", dur_us="int", compile_id="name", frame="name", reason="name")
        for number in range(60):
            step(made, compile=100 if number % 12 == 5 else 0.1)
            if number % 12 == 5:
                made.log.add("compilations", (number * 10**7, *row_of(number)))

    return write


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("rate, a Python number that changes", "pass it as a tensor"),
        ("a batch of another shape", "jit_compile=False"),
        ("inputs of another shape or type", "input_signature"),
        ("for other shapes, types or static arguments", "not as a static argument"),
        ("called outside of jit", "jit the function that calls it"),
        ("tensor 'x' size mismatch at index 0. expected 8, actual 9", "mark_dynamic"),
        ("0/5: tensor 'x' size mismatch at index 0. expected 8, actual 9", "mark_dynamic"),
        ("2/0: dim == -2  # v = g.mean(dim=dim)  # train.py:123 in step", "pass numbers that change as tensors"),
    ],
)
def test_the_remedy_of_a_recompilation_is_of_its_reason(found, reason, remedy):
    """What helps is another thing for each framework and each reason that its plug-in notes."""
    one = found(recompiled(lambda number: (100_000, str(number), "train", reason)))["recompilation"]
    # Without the number that PyTorch gives to a compilation, and the line of the program behind it.
    assert reason.removeprefix("0/5: ").removeprefix("2/0: ").partition("  #")[0] == one.why
    assert one.fact.startswith("5 recompilations of train take ")
    assert remedy in one.remedy


def test_the_cause_of_recompilations_is_that_of_most_of_their_time(found):
    """A whole step twice, with a number of PyTorch in each reason, and more often small ones of one reason."""
    steps = {number: (600_000 - number, "2", "train", f"size {number}") for number in (5, 17)}
    one = found(recompiled(lambda number: steps.get(number, (300_000, "3", "add", "outside of jit"))))["recompilation"]
    assert one.fact.startswith("5 recompilations mostly of train take ")
    assert "size 5" == one.why
