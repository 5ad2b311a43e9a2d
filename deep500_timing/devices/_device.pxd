# C types of _device.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t


@cython.final
cdef class EventAnchor:
    cdef public object event
    cdef public object now_ns
    cdef public int64_t low_ns
    cdef public int64_t high_ns
    cdef public bint is_done
    cdef public int64_t due_ns
    cdef public int64_t place_ns
    cdef public bint placed
    cdef public bint retired
    cdef public EventAnchor previous
    cdef public Py_ssize_t users

    cpdef done_before(self, int64_t high_ns)
    @cython.locals(drift_ns=int64_t, low_ns=int64_t, high_ns=int64_t)
    cpdef narrow(self, EventAnchor earlier, int64_t elapsed_ns)
    cpdef raise_low(self, int64_t low_ns)
    cpdef place(self)
    cpdef int64_t uncertainty_ns(self)


@cython.final
cdef class StreamQueue:
    cdef public object stream
    cdef public object handle
    cdef public object device
    cdef public list free
    cdef public object pending
    cdef public Py_ssize_t known_done
    cdef public Py_ssize_t created
    cdef public Py_ssize_t faults
    cdef public dict anchors
    cdef public EventAnchor latest
    cdef public int64_t uncertainty_ns

    cpdef give_back(self, object start, EventAnchor anchor)


@cython.final
cdef class EventPair:
    cdef public object name
    cdef public object now_ns
    cdef public object start
    cdef public StreamQueue queue
    cdef public EventAnchor anchor
    cdef public bint captured


@cython.final
cdef class Captures:
    cdef public Py_ssize_t under_way
    cdef public object query_lock
    cdef dict _graphs
    cdef object __weakref__

    cpdef _forget(self, object key)


cdef class Device:
    cdef public bint is_null
    cdef public bint is_lazy

    cpdef begin(self, EventPair pair)
    cpdef end(self, EventPair pair, object sink, int64_t start_ns, int64_t end_ns)
    cpdef drop(self, EventPair pair)


@cython.final
cdef class NullDevice(Device):
    pass
