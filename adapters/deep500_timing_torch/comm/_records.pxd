# C types of _records.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

# C types are where the core has them: a cimport goes to no other name, so that they have no public one. Such modules are
# compiled with the core, in one build.
from deep500_timing._recording.intervals cimport Intervals


@cython.final
cdef class Record:
    cdef public object op
    cdef public object common_name
    cdef public object label
    cdef public object nbytes
    cdef public Group group
    cdef public bint size_is_mean
    cdef public int64_t calls
    cdef public int64_t bytes_total
    cdef public bint no_future
    cdef public bint on_device
    cdef public bint upper_bound
    cdef public int64_t advance
    cdef public double blocked
    cdef public Intervals latency
    cdef public Intervals issue
    cdef public Intervals exposed
    cdef public int64_t paired_latency_ns
    cdef public int64_t paired_exposed_ns
    cdef public int64_t started
    cdef public int64_t finished
    cdef public int64_t failed
    cdef public int64_t untimed

    cpdef take_whole(
        self, int64_t start_ns, int64_t end_ns, object seq, int64_t issued_ns, int64_t wait_start_ns,
        int64_t wait_end_ns, object run=*
    )
    cdef _take_time(self, int64_t start_ns, int64_t end_ns, object seq, object run)


@cython.final
cdef class Group:
    cdef public object reference
    cdef public int64_t own_seq
    cdef public object device_end
    cdef public bint backend_counts
    cdef public object name
    cdef public object size
    cdef public object rank
    cdef public object global_ranks
    cdef public dict records
    cdef public dict sizes
    cdef public object ring
    cdef public dict advances
    cdef public int64_t seen
    cdef public object _watched_from
    cdef public object _unseen_before

    cpdef sequence(self, process_group)
