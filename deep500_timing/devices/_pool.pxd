# C types of _pool.py; Cython reads both. Plain Python never sees this file.
cimport cython
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t

from deep500_timing.devices._device cimport Captures, Device, EventAnchor, EventPair, StreamQueue

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
    cdef object _elapsed_ms
    cdef object _device_now
    cdef bint _stalls
    cdef object _lock
    cdef object __weakref__

    cdef _prepare(self)
    @cython.locals(queue=StreamQueue)
    cdef StreamQueue _current_queue(self)
    @cython.locals(queue=StreamQueue)
    cpdef begin(self, EventPair pair)
    @cython.locals(queue=StreamQueue, start_queue=StreamQueue, anchor=EventAnchor)
    cpdef end(self, EventPair pair, object sink, int64_t start_ns, int64_t end_ns)
    cpdef drop(self, EventPair pair)
    cdef _new_event(self, StreamQueue queue)
    @cython.locals(anchor=EventAnchor, before=EventAnchor, low_ns=int64_t)
    cdef _anchor(self, EventPair pair, StreamQueue queue, object event)
    @cython.locals(low_ns=int64_t, done=bint)
    cdef bint _ask(self, EventAnchor anchor) except -1
    @cython.locals(previous=EventAnchor)
    cdef _place(self, StreamQueue queue, EventAnchor anchor)
    @cython.locals(elapsed_ms=double)
    cdef int64_t _elapsed_ns(self, object start, object end) except? -1
    @cython.locals(count=Py_ssize_t, middle=Py_ssize_t)
    cdef _reclaim(self, StreamQueue queue)
    @cython.locals(entry=tuple, start_queue=StreamQueue)
    cdef _read_oldest(self, StreamQueue queue, Py_ssize_t count)
    @cython.locals(
        start_queue=StreamQueue, anchor=EventAnchor, start_ns=int64_t, end_ns=int64_t, duration_ns=int64_t,
        since_ns=int64_t, placed_ns=int64_t, done=bint
    )
    cdef bint _settle(self, StreamQueue queue, tuple entry) except -1
