"""Timers with a name, on which the interfaces of other projects stand."""
