# C types of _log.py; Cython reads both. Plain Python never sees this file.
cimport cython

from deep500_timing_torch.comm._records cimport Group, Record


@cython.final
cdef class CommLog:
    cdef readonly object inbox, _draining
    cdef readonly dict known_groups, under_way
    cdef list _past
    cdef readonly Group alone
    cdef Group _latest
    cdef public object observer
    cdef bint _watching, _complete

    cpdef put(self, Record record, kind, start_ns, end_ns, sequence=*)
    @cython.locals(record=Record)
    cpdef drain(self, bint wait)
    cdef _tell(self, Record record, kind, start_ns, end_ns)
    @cython.locals(group=Group)
    cpdef Group group_of(self, process_group)
    cdef Group _new_group(self, process_group)
