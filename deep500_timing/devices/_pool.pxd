# C types of _pool.py; Cython reads both. Plain Python never sees this file.
#
# Regions and intervals have no type here: whatever else marks the device may hand in things of its own like them.
cimport cython


@cython.final
cdef class _Lane:
    cdef public object stream
    cdef public list free
    cdef public object pending
    cdef public Py_ssize_t known_done
    cdef public Py_ssize_t created


@cython.final
cdef class DeviceLedger:
    cdef public object clock
    cdef public dict _lanes
    cdef public object _collecting
    cdef public object _collector
    cdef object __weakref__

    @cython.locals(lane=_Lane)
    cpdef begin(self, object region)
    @cython.locals(lane=_Lane, start_lane=_Lane)
    cpdef end(self, object region, Py_ssize_t keep_last, Py_ssize_t skip_first)
    cpdef _new_event(self, _Lane lane)
    @cython.locals(count=Py_ssize_t)
    cpdef _reclaim(self, _Lane lane)
    @cython.locals(start_lane=_Lane)
    cpdef _collect(self, _Lane lane, Py_ssize_t count)
