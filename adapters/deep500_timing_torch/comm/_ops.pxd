# C types of _ops.py; Cython reads both. Plain Python never sees this file.
cimport cython

cpdef _bytes(value)


@cython.final
cdef class Op:
    cdef readonly str name
    cdef readonly object describe, factor
    cdef readonly bint synchronizes, point_to_point
