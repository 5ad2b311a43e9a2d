# C types of _pool.py; Cython reads both. Plain Python never sees this file.
cimport cython
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t

from deep500_timing.devices._null cimport Device
from deep500_timing.devices._queue cimport Anchor, Captures, EventPair, StreamQueue

cdef Captures captures


cdef inline keep_for_good(object event):
    Py_INCREF(event)


cdef class EventPool(Device):
    cdef object _clock
    cdef public dict _queues
    cdef StreamQueue _last
    cdef object _stream
    cdef object _is_capturing
    cdef object _record
    cdef object _handle_of
    cdef object _device_of
    cdef object _device_now
    cdef object _elapsed_ms
    cdef bint _stalls
    cdef object _collecting
    cdef object _collector
    cdef object __weakref__

    cdef _prepare(self)
    @cython.locals(queue=StreamQueue)
    cdef StreamQueue _current_queue(self)
    @cython.locals(queue=StreamQueue, anchor=Anchor)
    cpdef begin(self, EventPair pair)
    @cython.locals(queue=StreamQueue, start_queue=StreamQueue, anchor=Anchor)
    cpdef end(self, EventPair pair, object sink, int64_t start_ns, int64_t end_ns)
    cpdef drop(self, EventPair pair)
    cdef _new_event(self, StreamQueue queue)
    cdef _give_back(self, StreamQueue queue, object start, Anchor anchor)
    @cython.locals(anchor=Anchor, low_ns=int64_t)
    cdef Anchor _anchor(self, StreamQueue queue, object now_ns, object event)
    @cython.locals(low_ns=int64_t, done=bint)
    cdef bint _ask_anchor(self, Anchor anchor) except -1
    @cython.locals(previous=Anchor)
    cdef _place(self, StreamQueue queue, Anchor anchor)
    @cython.locals(count=Py_ssize_t, middle=Py_ssize_t)
    cdef _reclaim(self, StreamQueue queue)
    cdef bint _doubt(self, StreamQueue queue, object error) except -1
    @cython.locals(entry=tuple, free=list)
    cdef _collect(self, StreamQueue queue, Py_ssize_t count)
    @cython.locals(
        start_queue=StreamQueue, pair=EventPair, anchor=Anchor, start_ns=int64_t, end_ns=int64_t, duration_ns=int64_t,
        since_ns=int64_t, placed_ns=int64_t, lead_ns=int64_t, done=bint
    )
    cdef _settle(self, StreamQueue queue, tuple entry, object device)
    @cython.locals(elapsed_ms=double)
    cdef int64_t _elapsed_ns(self, object start, object end) except? -1
