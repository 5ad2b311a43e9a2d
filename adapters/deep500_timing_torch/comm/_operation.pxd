# C types of _operation.py; Cython reads both. Plain Python never sees this file.
cimport cython

from deep500_timing_torch.comm._log cimport CommLog, Group, Record
from deep500_timing_torch.comm._ops cimport Op
from deep500_timing_torch.comm._settings cimport Settings

cdef CommLog LOG
cdef Settings SETTINGS
cdef object CAPTURED, DONE, EXPOSED, FAILED, ISSUE, UNTIMED
cdef set _inside
cdef object _world, _coalescing, _Work, _Future


@cython.final
cdef class PendingOp:
    cdef object __weakref__
    cdef readonly Record record
    cdef readonly object start_ns, done_ns, pool, sequence
    cdef readonly bint captured, asynchronous, recorded
    cdef public int waits_left, exposures_left
    cdef public object exposed_ns
    cdef bint _alone, _blocking
    cdef object _stretch

    cpdef bint called(self, int handles, bint followed=*, bint blocking=*)
    cpdef bint launched(self, bint blocking)
    cpdef follow(self, work)
    cdef _over(self, end_ns)
    cdef _end_stretch(self)
    cdef _end(self, kind, end_ns=*)
    cpdef untimed(self)
    cpdef ended(self, bint failed)
    cpdef start_wait(self)
    cpdef end_wait(self, token, error=*)
    cpdef exposed(self, start_ns, end_ns)


@cython.locals(group=Group)
cpdef dispatched(Op op, nbytes, process_group, tensor)
@cython.locals(pending=PendingOp)
cpdef measure(func, Op op, tuple args, dict kwargs, options)
cpdef run(PendingOp op, func, tuple args, dict kwargs)
@cython.locals(group=Group)
cdef PendingOp _begin(Op op, tuple args, dict kwargs, options)
cdef _replace_handles(PendingOp op, result)
