# C types of _steps.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

from deep500_timing._recording.intervals cimport keep
from deep500_timing._recording.recorder cimport Recorder, Region, clock_ns, thread_id

cdef int IO, COPY, FORWARD, NO_GRAD, BACKWARD, GRAD, STEP, _NONE
cdef int _PREPARE, _LOSS, _GRADIENTS, _NEXT, _OTHER, _BATCH, HERE, INSIDE, _LOOK_UNTIL, _LOOK_EVERY, _UNHOOKED


cdef inline int64_t address(object thing):
    return <int64_t><void*>thing


@cython.final
cdef class Steps:
    # In the order of their use: the first two cache lines serve most calls.
    cdef public unsigned long thread
    cdef public int depth
    cdef public bint in_forward
    cdef public bint in_backward
    cdef int _last
    cdef int64_t _last_ns
    cdef int64_t _batch_ns
    cdef int64_t _ended_ns
    cdef int64_t _eval_ns
    cdef list _ours
    cdef object _probe
    cdef bint _begins_batch
    cdef bint _has_hooked
    cdef bint _has_several
    cdef bint _in_backward_stepped
    cdef int _waiting
    cdef int64_t _fetched_ns
    cdef int64_t _open_step
    cdef int64_t _first_stepped
    cdef set _stepped
    cdef readonly Py_ssize_t steps
    cdef object _is_grad_enabled
    cdef readonly object log
    cdef readonly Recorder timer
    cdef public bint on_device
    cdef readonly dict regions
    cdef public object when_stepped
    cdef int64_t _evaluated_ns
    cdef bint _trains_in_eval
    cdef object _model
    cdef object _off
    cdef int64_t _buffer[384]

    cpdef record(self, str name, int64_t start_ns, int64_t end_ns)
    cdef _keep(self, int place, int64_t start_ns, int64_t end_ns)
    cpdef int64_t drain(self) except -1
    cpdef forget(self)
    cdef _resolve(self)
    cpdef bint is_here(self)
    @cython.locals(here=bint, now=int64_t)
    cpdef int begin(self, int event) except? -1
    cpdef int begin_call(self, object model) except? -1
    @cython.locals(event=int, here=bint, now=int64_t)
    cpdef end(self, int state)
    cpdef end_call(self, object model, int state)
    @cython.locals(event=int)
    cpdef fail(self, int state)
    cdef void _within(self, int event, bint is_open) noexcept
    cdef _start(self, int event, int64_t now, bint here)
    cdef int64_t _end(self, int event, bint here) except -1
    cdef _enter(self, int event, int64_t now)
    cdef _leave(self, int event, int64_t now)
    @cython.locals(last=int, row=int)
    cdef _record_between(self, int event, int64_t now)
    cdef _end_batch(self)
    cpdef pause(self)
    cpdef bint end_of_data(self, int state) except? -1
    cpdef copied(self, int64_t start_ns)
    @cython.locals(ident=int64_t, now=int64_t)
    cpdef begin_step(self, object optimizer)
    cdef _train_here(self)
    @cython.locals(ident=int64_t, now=int64_t)
    cpdef end_step(self, object optimizer)
    cdef _end_batch_of(self, int64_t ident)
    @cython.locals(begun_ns=int64_t, past=Py_ssize_t)
    cdef _end_step(self, int64_t ident)
    cdef _end_backward(self)
    cdef _look_for_a_step(self, int64_t now)
    cdef _end_of_evaluation(self, int event, int64_t now)
    cdef _record_evaluation(self, int64_t end_ns)


cdef inline take(Steps steps):
    cdef int at
    cdef Region region
    for at in range(0, steps._waiting, 3):
        region = steps._ours[steps._buffer[at]]
        if region is not None:
            keep(region._intervals, steps._buffer[at + 1], steps._buffer[at + 2])
    steps._waiting = 0


cdef inline put(Steps steps, int place, int64_t start_ns, int64_t end_ns):
    cdef int64_t* at = steps._buffer + steps._waiting
    at[0] = place
    at[1] = start_ns
    at[2] = end_ns
    steps._waiting += 3
    if steps._waiting == 384:
        take(steps)
