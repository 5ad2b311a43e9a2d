# C types of _pool.py; Cython reads both. Plain Python never sees this file.
cimport cython
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t

from deep500_timing.devices._anchors cimport Anchors
from deep500_timing.devices._collecting cimport Collector
from deep500_timing.devices._null cimport Device
from deep500_timing.devices._queue cimport EventAnchor, Captures, EventPair, StreamQueue

cdef Captures captures


cdef inline keep_for_good(object event):
    Py_INCREF(event)


cdef class EventPool(Device):
    cdef object _clock
    cdef Anchors _anchors
    cdef Collector _collector
    cdef public dict _queues
    cdef StreamQueue _last
    cdef object _stream
    cdef object _is_capturing
    cdef object _record
    cdef object _handle_of
    cdef object _device_of
    cdef object __weakref__

    cdef _prepare(self)
    @cython.locals(queue=StreamQueue)
    cdef StreamQueue _current_queue(self)
    @cython.locals(queue=StreamQueue, anchor=EventAnchor)
    cpdef begin(self, EventPair pair)
    @cython.locals(queue=StreamQueue, start_queue=StreamQueue, anchor=EventAnchor)
    cpdef end(self, EventPair pair, object sink, int64_t start_ns, int64_t end_ns)
    cpdef drop(self, EventPair pair)
    cdef _new_event(self, StreamQueue queue)
