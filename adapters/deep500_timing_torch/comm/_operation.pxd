# C types of _operation.py; Cython reads both. Plain Python never sees this file.
cimport cython

from deep500_timing_torch.comm._log cimport CommLog, Group, Record
from deep500_timing_torch.comm._ops cimport Op
from deep500_timing_torch.comm._settings cimport Settings

cdef CommLog LOG
cdef Settings SETTINGS
cdef object CAPTURED, DONE, EXPOSED, FAILED, ISSUE, PAIR, SYNC, UNTIMED
cdef set _inside
cdef object _world, _coalescing, _Work, _Future, _HALVES


@cython.final
cdef class PendingOp:
    cdef object __weakref__
    cdef readonly Record record
    cdef readonly object start_ns, done_ns, pool, sequence
    cdef readonly bint captured, asynchronous, recorded
    cdef public int waits_left
    cdef object _before, _exposed_ns, _halves, _here, _stretch, _tell_duration
    cdef bint _blocking, _started
    cdef int _exposures_left

    cpdef bint called(self, int handles, bint followed=*, bint blocking=*)
    cpdef follow(self, work)
    cdef _call_over(self, end_ns)
    cdef _end_stretch(self)
    cdef bint _settle(self)
    cdef done(self, start_ns, end_ns)
    cpdef untimed(self)
    cdef _give_up(self, kind)
    cpdef ended(self, bint failed)
    cpdef start_wait(self)
    cpdef end_wait(self, token, error=*)
    cpdef exposed(self, start_ns, end_ns)
    cdef _second(self)


@cython.locals(group=Group)
cpdef dispatched(Op op, nbytes, process_group, tensor)
cpdef bint launched(PendingOp op)
@cython.locals(pending=PendingOp)
cpdef measure(func, Op op, tuple args, dict kwargs, options)
@cython.locals(group=Group)
cdef PendingOp _begin(Op op, tuple args, dict kwargs, options)
cdef _replace_handles(PendingOp op, result)
