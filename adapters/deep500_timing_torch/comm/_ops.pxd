# C types of _ops.py; Cython reads both. Plain Python never sees this file.
cimport cython

cpdef _bytes(value)


@cython.final
cdef class Op:
    cdef readonly str name
    cdef readonly object describe
    cdef readonly object factor
    cdef readonly bint synchronizes
    cdef readonly bint point_to_point
