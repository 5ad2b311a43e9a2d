# C types of _null.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

from deep500_timing.devices._queue cimport EventPair


cdef class Device:
    cdef public bint is_null
    cdef public bint is_lazy
    cdef public bint for_named_timers

    cpdef begin(self, EventPair pair)
    cpdef end(self, EventPair pair, object sink, int64_t start_ns, int64_t end_ns)
    cpdef drop(self, EventPair pair)


@cython.final
cdef class NullDevice(Device):
    pass
