# C types of _settings.py; Cython reads both. Plain Python never sees this file.
cimport cython


@cython.final
cdef class Settings:
    cdef public bint enabled
    cdef public bint prof_all
    cdef public object prof_ops
    cdef public bint verbose
    cdef public bint debug
    cdef public object timer
    cdef public object device_times
    cdef public object now_ns
    cdef public object kernel
    cdef public bint by_functions

    cpdef bint wants(self, name) except -1
    cpdef region(self, name, start_ns, end_ns)
