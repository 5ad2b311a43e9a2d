"""A scheduler of virtual time for exchanges: ranks are threads of one process, of which one runs at a time.

A deadline passes when every rank waits, never because the machine is busy.
"""

from __future__ import annotations

import random
import threading

from deep500_timing._distributed import connection, exchange


def schedule_exchanges(monkeypatch, seed=0):
    """The schedule in which all exchanges and their connections run from now on, until the test ends."""
    schedule = Schedule(seed)
    for module in (connection, exchange):
        monkeypatch.setattr(module, "time", Clock(schedule))
    monkeypatch.setattr(connection, "threading", Threads(schedule))
    return schedule


class Schedule:
    """Runs one thread at a time, chosen by a seed; time passes when no thread can run.

    Args:
        seed: Of the choices.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.tasks = []
        self.held_share, self.held_s = 0.0, 0.0
        """Share of the requests that are held up, and for how long at most."""
        self._current = None
        self._main = threading.Semaphore(0)

    def spawn(self, work):
        """Start a thread."""
        task = _Task(self, work)
        self.tasks.append(task)
        return task

    def pause(self, seconds):
        """Let the running thread sleep."""
        self.wait_for(None, seconds)

    def wait_for(self, condition, seconds):
        """Let the running thread wait for a condition; gives whether it holds."""
        task = self._current
        task.wake_s, task.condition = self.now_s + max(seconds, 0.0), condition
        self._main.release()
        task.go.acquire()
        return condition is not None and condition()

    def request(self):
        """The time of one half of a request."""
        held = self.random.uniform(0, self.held_s) if self.random.random() < self.held_share else 0.0
        self.pause(self.random.uniform(1e-5, 3e-3) + held)

    def run(self, tasks):
        """Run until these threads have ended."""
        while not all(task.done for task in tasks):
            ready = [t for t in self.tasks if t.wake_s <= self.now_s or (t.condition is not None and t.condition())]
            if not ready:
                self.now_s = min(task.wake_s for task in self.tasks)
                continue
            self._current = task = self.random.choice(ready)
            task.go.release()
            self._main.acquire()
            if task.done:
                self.tasks.remove(task)
            if task.error is not None:
                raise task.error

    def run_all(self, *calls):
        """Run these functions, each on a thread, until all have returned; gives their results."""
        found = {}
        tasks = [self.spawn(lambda at=at, call=call: found.update({at: call()})) for at, call in enumerate(calls)]
        self.run(tasks)
        return [found[at] for at in range(len(calls))]


class _Task:
    def __init__(self, schedule, work):
        self.wake_s, self.condition, self.done, self.go = schedule.now_s, None, False, threading.Semaphore(0)
        self.error = None

        def body():
            self.go.acquire()
            try:
                work()
            except BaseException as error:
                self.error = error
            finally:
                self.done = True
                schedule._main.release()

        threading.Thread(target=body, daemon=True).start()


class Clock:
    """Stands for the module ``time``."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.sleep = schedule.pause

    def monotonic(self):
        """Virtual seconds."""
        return self.schedule.now_s

    time = monotonic


class Threads:
    """Stands for the module ``threading`` in a connection."""

    def __init__(self, schedule):
        class Lock:
            def __init__(self):
                self.free = True

            def acquire(self, timeout):
                if not self.free and not schedule.wait_for(lambda: self.free, timeout):
                    return False
                self.free = False
                return True

            def release(self):
                self.free = True

            def __enter__(self):
                self.acquire(1e9)

            def __exit__(self, *_):
                self.release()

        class Event:
            def __init__(self):
                self.set_ = False

            def set(self):
                self.set_ = True

            def clear(self):
                self.set_ = False

            def is_set(self):
                return self.set_

            def wait(self, timeout=1e9):
                return self.set_ or schedule.wait_for(self.is_set, timeout)

        class Thread:
            def __init__(self, target, name, daemon):
                self.target = target

            def start(self):
                schedule.spawn(self.target)

        self.Lock, self.Event, self.Thread = Lock, Event, Thread
