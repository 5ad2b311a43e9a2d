# C types of _log.py; Cython reads both. Plain Python never sees this file.
cimport cython

from deep500_timing._recording.intervals cimport Intervals
from deep500_timing_torch.comm._ops cimport Op
from deep500_timing_torch.comm._settings cimport Settings

cdef Settings SETTINGS


@cython.final
cdef class Record:
    cdef readonly Op op
    cdef readonly object label, nbytes
    cdef readonly Group group
    cdef readonly bint size_is_mean
    cdef public object calls, bytes_total
    cdef public bint on_device, upper_bound
    cdef readonly Intervals latency
    cdef readonly list counts, sums_ns
    cdef readonly object paired_ns, hidden_ns

    cpdef take(self, int kind, start_ns, end_ns, sequence, op, run)
    cdef _pair(self, op, exposed_ns)


@cython.final
cdef class Group:
    cdef public object reference, device_end, recorded
    cdef readonly object name, size, rank, ring
    cdef readonly list global_ranks
    cdef readonly dict records, sizes
    cdef public long long seen
    cdef long long _own_sequence
    cdef bint _backend_counts
    cdef object _unseen_from, _unseen_before

    cpdef number(self)
    cpdef count(self, expected)
    @cython.locals(record=Record)
    cpdef Record record(self, Op op, label, nbytes)


@cython.final
cdef class CommLog:
    cdef readonly object inbox, _draining
    cdef readonly dict known_groups, under_way
    cdef list _groups
    cdef readonly Group alone
    cdef bint _watching

    cpdef put(self, Record record, kind, start_ns, end_ns, sequence=*, op=*)
    @cython.locals(record=Record)
    cpdef drain(self, bint wait)
    @cython.locals(group=Group)
    cpdef Group group_of(self, process_group)
