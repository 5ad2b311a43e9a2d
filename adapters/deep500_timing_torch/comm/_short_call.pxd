# C types of _short_call.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

# C types are where the core has them: a cimport goes to no other name, so that they have no public one. Such modules are
# compiled with the core, in one build.
from deep500_timing._recording.intervals cimport Intervals
from deep500_timing._recording.recorder cimport thread_id
from deep500_timing_torch.comm._records cimport Group, Record
from deep500_timing_torch.comm._short_way cimport Course, now

cdef extern from "Python.h":
    object called "PyObject_Call"(object, object, object)

cdef dict logs


@cython.final
cdef class ShortCall:
    cdef object _func
    cdef object _op
    cdef object _slowly
    cdef object _finish
    cdef object _note_failure
    cdef object _name
    cdef object _common_name
    cdef object _describe
    cdef object _handles
    cdef dict _groups
    cdef object _inbox
    cdef set _inside
    cdef Py_ssize_t _message_at
    cdef Py_ssize_t _group_at
    cdef bint _synchronizes

    @cython.locals(
        advance=int64_t, start_ns=int64_t, end_ns=int64_t, per_rank=bint, record=Record, group=Group, latency=Intervals, course=Course
    )
    cpdef call(self, tuple args, dict kwargs)
