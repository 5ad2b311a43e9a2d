# C types of _settings.py; Cython reads both. Plain Python never sees this file.
cimport cython


@cython.final
cdef class Settings:
    cdef public bint enabled, prof_all, verbose, debug, by_functions
    cdef public object prof_ops, timer, device_times, now_ns, kernel, why_no_kernel
    cdef public int instruments
    cdef object _wanted

    cpdef bint wants(self, name) except -1
    cpdef region(self, name, start_ns, end_ns)
