# C types of intervals.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

from cpython cimport array

cdef inline array.array new_block(array.array template, Py_ssize_t length):
    # Not set to zero: that would touch every page of it at once, which on a page's first use costs about 2 us each.
    return array.clone(template, length, False)


cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
      static inline int d5_bit_length(long long value) {
          return value ? 64 - __builtin_clzll((unsigned long long)value) : 0;
      }
    #else
      static inline int d5_bit_length(long long value) {
          int length = 0;
          while (value) { value >>= 1; length++; }
          return length;
      }
    #endif
    """
    int bit_length "d5_bit_length"(long long value) noexcept


@cython.final
cdef class Intervals:
    cdef int64_t[::1] buffer
    cdef object block
    cdef Py_ssize_t index
    cdef Py_ssize_t limit
    cdef list blocks
    cdef int64_t[::1] bins
    cdef readonly Py_ssize_t kept_in_blocks
    cdef readonly unsigned long version
    cdef readonly Py_ssize_t keep_last
    cdef readonly Py_ssize_t skip_first
    cdef readonly int64_t folded
    cdef readonly int64_t total_ns
    cdef readonly int64_t min_ns
    cdef readonly int64_t max_ns
    cdef readonly double mean_ns
    cdef readonly double m2
    cdef public int64_t failed
    cdef public int64_t discarded
    cdef public int64_t captured

    cdef int put(self, int64_t start_ns, int64_t end_ns) except -1
    cdef int _new_buffer(self) except -1
    cdef int seal(self) except -1
    @cython.locals(i=Py_ssize_t, duration=int64_t, seen=int64_t, shift=int, delta=double, slot=Py_ssize_t)
    cdef int _fold(self, int64_t[::1] block) except -1
