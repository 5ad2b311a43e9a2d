# C types of _short_way.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

# C types are where the core has them: a cimport goes to no other name, so that they have no public one. Such modules are
# compiled with the core, in one build.
from deep500_timing._recording.recorder cimport clock_ns
from deep500_timing_torch.comm._records cimport Record

cdef extern from "Python.h":
    object PyWeakref_NewRef(object, void*)

cdef inline object weak(object course):
    return PyWeakref_NewRef(course, NULL)

cdef object _clock
cdef int64_t now() except -1
cdef dict _under_way
cdef dict logs
cdef double _NEVER
cdef double _SETTLED


@cython.final
@cython.freelist(32)
cdef class Course:
    cdef object __weakref__
    cdef object here
    cdef readonly object work
    cdef readonly Record record
    cdef readonly int64_t start_ns
    cdef readonly int64_t issued_ns
    cdef readonly int64_t ended_ns
    cdef public list ends
    cdef public object seq
    cdef public int64_t latency_ns
    cdef public bint waited

    cdef begin(self, work, Record record, int64_t start_ns, int64_t issued_ns)
    @cython.locals(record=Record)
    cdef bint follow(self) except -1
    cdef object handle(self)
    cpdef future(self)
    @cython.locals(over=bint, start_ns=int64_t, end_ns=int64_t)
    cdef wait(self, tuple args, dict kwargs)
    @cython.locals(record=Record, done_ns=int64_t, ends=list)
    cdef take_wait(self, bint over, int64_t start_ns, int64_t end_ns)
    @cython.locals(record=Record, done_ns=int64_t)
    cpdef look(self)


cdef _wait(Course course, tuple args, dict kwargs)
