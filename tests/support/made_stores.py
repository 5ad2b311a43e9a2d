"""A job's store in memory, for ranks that are threads of one process."""

from __future__ import annotations

import threading


class Memory:
    """The least that a store must do. ``on_look`` is called with the keys of each check, ``fault`` raised by all."""

    def __init__(self):
        """It is empty."""
        self.values = {}
        self.fault = None
        self.on_look = None
        self.asked = 0
        self.lock = threading.RLock()

    def _ask(self):
        self.asked += 1
        if self.fault is not None:
            raise self.fault

    def set(self, key, value):
        """Put a value."""
        with self.lock:
            self._ask()
            self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key):
        """Get it."""
        with self.lock:
            self._ask()
            return self.values[key]

    def check(self, keys):
        """Whether all are there."""
        with self.lock:
            self._ask()
            if self.on_look is not None:
                self.on_look(keys)
            return all(key in self.values for key in keys)

    def add(self, key, amount):
        """Count."""
        with self.lock:
            self._ask()
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]

    def delete_key(self, key):
        """Remove one, if it is there."""
        with self.lock:
            return self.values.pop(key, None) is not None


class Able(Memory):
    """A store that reads many values by one request, as TCPStore does."""

    def multi_get(self, keys):
        """Get several by one request."""
        with self.lock:
            self._ask()
            return [self.values[key] for key in keys]
