# C types of _steps.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

from deep500_timing._recording.recorder cimport Recorder, clock_ns, thread_id

cdef int IO, COPY, FORWARD, NO_GRAD, BACKWARD, GRAD, STEP, _NONE


cdef class Steps:
    cdef readonly object log
    cdef readonly Recorder timer
    cdef public bint on_device
    cdef public unsigned long thread
    cdef public int depth
    cdef public bint in_forward
    cdef public bint in_backward
    cdef readonly Py_ssize_t steps
    cdef readonly dict regions
    cdef list _by_event
    cdef int _last
    cdef int64_t _last_ns
    cdef int64_t _batch_ns
    cdef int64_t _ended_ns
    cdef set _stepped
    cdef list _open_steps
    cdef bint _in_backward_stepped
    cdef int64_t _eval_ns
    cdef int64_t _evaluated_ns
    cdef int64_t _fetched_ns
    cdef bint _begins_batch
    cdef bint _trains_in_eval
    cdef bint _has_hooked
    cdef object _model
    cdef object _probe
    cdef object _off
    cdef object _begin_log

    cpdef record(self, str name, int64_t start_ns, int64_t end_ns)
    cpdef bint is_here(self)
    @cython.locals(here=bint)
    cpdef bint begin(self, int event) except -1
    cpdef end(self, int event, bint here)
    cpdef fail(self, int event, bint here)
    cdef _enter(self, int event)
    cdef _leave(self, int event)
    @cython.locals(last=int)
    cdef _record_between(self, int event, int64_t now)
    cdef _end_batch(self)
    cpdef pause(self)
    cpdef end_of_data(self)
    cpdef copied(self, int64_t start_ns)
    cpdef begin_step(self, object optimizer)
    cdef _begin_step(self, object ident)
    @cython.locals(begun_ns=int64_t)
    cdef _end_step(self, object ident)
    cpdef end_step(self, object optimizer)
    cdef _end_backward(self)
    cdef _look_for_a_step(self, int64_t now)
    cpdef called(self, object model, bint evaluates)
    cdef _end_of_evaluation(self, int event, int64_t now)
    cdef _record_evaluation(self, int64_t end_ns)
    cpdef bint counts_as_evaluation(self, bint training, bint grad)
