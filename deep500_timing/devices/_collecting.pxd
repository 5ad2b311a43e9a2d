# C types of _collecting.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

from deep500_timing.devices._anchors cimport Anchors
from deep500_timing.devices._queue cimport EventAnchor, Captures, EventPair, StreamQueue

cdef Captures captures


@cython.final
cdef class Collector:
    cdef object _clock
    cdef Anchors _anchors
    cdef object _device_now
    cdef bint _stalls
    cdef object _lock
    cdef object _thread

    cdef prepare(self)
    cdef abandon(self)
    @cython.locals(count=Py_ssize_t, middle=Py_ssize_t)
    cdef reclaim(self, StreamQueue queue)
    cdef bint _doubt(self, StreamQueue queue, object error) except -1
    @cython.locals(entry=tuple, free=list, start_queue=StreamQueue)
    cdef _collect(self, StreamQueue queue, Py_ssize_t count)
    @cython.locals(
        start_queue=StreamQueue, pair=EventPair, anchor=EventAnchor, start_ns=int64_t, end_ns=int64_t, duration_ns=int64_t,
        since_ns=int64_t, placed_ns=int64_t, lead_ns=int64_t, done=bint
    )
    cdef _settle(self, StreamQueue queue, tuple entry, object device)
