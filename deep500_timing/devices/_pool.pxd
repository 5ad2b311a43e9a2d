# C types of _pool.py; Cython reads both. Plain Python never sees this file.
#
# Regions and intervals have no type here: whatever else marks the device may hand in things of its own like them.
cimport cython


@cython.final
cdef class StreamQueue:
    cdef public object stream
    cdef public list free
    cdef public object pending
    cdef public Py_ssize_t known_done
    cdef public Py_ssize_t created


@cython.final
cdef class EventPool:
    cdef public object clock
    cdef public dict _queues
    cdef public object _collecting
    cdef public object _collector
    cdef object __weakref__

    @cython.locals(queue=StreamQueue)
    cpdef begin(self, object region)
    @cython.locals(queue=StreamQueue, start_queue=StreamQueue)
    cpdef end(self, object region, Py_ssize_t keep_last, Py_ssize_t skip_first)
    cpdef _new_event(self, StreamQueue queue)
    @cython.locals(count=Py_ssize_t)
    cpdef _reclaim(self, StreamQueue queue)
    @cython.locals(start_queue=StreamQueue)
    cpdef _collect(self, StreamQueue queue, Py_ssize_t count)
