# C types of _loop.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

from deep500_timing._recording.recorder cimport Recorder, Region, clock_ns, thread_id

cdef extern from *:
    long long id "(long long)(Py_intptr_t)"(object) noexcept  # as a number of C

cdef int IO, COPY, FORWARD, NO_GRAD, BACKWARD, GRAD, STEP, REPLAY, NOTHING, HERE, INSIDE
cdef int _PREPARE, _LOSS, _GRADIENTS, _NEXT, _OTHER, _BATCH, _LOOK_UNTIL, _LOOK_EVERY, _MOST_ROWS


cdef class Loop


cdef class ThreadLoops:
    cdef Loop _newest
    cdef object _local
    cdef public int64_t version
    cdef public Loop in_backward
    cdef public object first_step, is_grad_enabled, before_wait

    @cython.locals(loop=Loop)
    cdef Loop _here(self)


@cython.final
cdef class Loop:
    # In the order of their use: the first cache lines serve most calls.
    cdef public int depth
    cdef public bint in_forward, in_backward, is_of_engine, trains, has_hooked, has_called, _looks
    cdef bint _waits, _has_moved, _has_events, _has_trained, _begins_batch, _has_waited
    cdef public int last
    cdef public int64_t last_ns
    cdef int64_t _begun_ns, _batch_ns, _ended_ns, _fetched_ns, _trained_ns, _fetched_rows, _open_step
    cdef int _rows
    cdef Recorder _timer
    cdef int64_t _version
    cdef list _ours, _open, _handles
    cdef object _phase, _probe
    cdef set _stepped
    cdef public Py_ssize_t stepped, rounds
    cdef readonly int64_t batches_ns
    cdef Py_ssize_t _numbered, _passes, _passes_before, _new_round, _fetches
    cdef readonly ThreadLoops loops
    cdef readonly unsigned long thread
    cdef public bint _in_backward_stepped
    cdef bint _is_limited, _trains_in_eval, _epoch_goes_on, _in_round, _has_gradients, _round_trains, _has_only_rounds
    cdef int64_t _epoch_ns, _epoch_over_ns, _epoch_ended_ns, _round_ns, _phase_round, _made_ns, _data_ns
    cdef public object _thread
    cdef object _model, _held, _leader, _policy, _single
    cdef dict _epochs, _known
    cdef list _found, _untold
    cdef int _row_places[1024]
    cdef int64_t _row_starts_ns[1024], _row_ends_ns[1024]

    cpdef bint may_train(self)
    cdef int64_t _now(self) except? -1
    @cython.locals(now=int64_t, here=bint)
    cpdef int begin(self, int event, int64_t called=*) except? -1
    cpdef int begin_call(self, object model) except? -1
    @cython.locals(event=int, now=int64_t)
    cpdef end(self, int state)
    cpdef end_call(self, object model, int state)
    cdef _keep(self, int place, int64_t start_ns, int64_t end_ns)
    cdef _start(self, int event, int64_t now)
    @cython.locals(now=int64_t)
    cdef int64_t _end(self, int event) except? -1
    cdef _close(self, int event)
    cdef _enter(self, int event, int64_t now, int64_t called=*)
    cdef _leave(self, int event, int64_t now)
    @cython.locals(last=int, place=int)
    cdef _between(self, int event, int64_t now)
    cdef _begin_wait(self, int64_t now)
    @cython.locals(ident=int64_t, now=int64_t)
    cpdef begin_step(self, object optimizer)
    cdef bint _begins_training(self, int64_t ident, object optimizer) except? -1
    cdef _tell_of_training(self)
    cdef _begin_step(self, int64_t ident, int64_t now, int event=*)
    @cython.locals(ident=int64_t, now=int64_t)
    cpdef end_step(self, object optimizer)
    cdef _count_round(self)
    cdef _end_step(self, int64_t ident)
    cdef _end_batch(self)
    @cython.locals(at=int)
    cdef _record_rows(self)
    cdef _end_backward(self)
    cpdef hook(self)
    cdef _look_for_a_round(self, int event, int64_t now, int64_t called)
