# C types of _anchors.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

from deep500_timing.devices._queue cimport EventAnchor, Captures, StreamQueue

cdef Captures captures


@cython.final
cdef class Anchors:
    cdef object _clock
    cdef object _elapsed_ms
    cdef object _record

    cdef prepare(self)
    @cython.locals(anchor=EventAnchor, low_ns=int64_t)
    cdef EventAnchor take(self, StreamQueue queue, object now_ns, object event)
    @cython.locals(low_ns=int64_t, done=bint)
    cdef bint ask(self, EventAnchor anchor) except -1
    @cython.locals(previous=EventAnchor)
    cdef place(self, StreamQueue queue, EventAnchor anchor)
    @cython.locals(elapsed_ms=double)
    cdef int64_t elapsed_ns(self, object start, object end) except? -1
