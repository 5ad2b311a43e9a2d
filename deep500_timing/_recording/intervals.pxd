# C types of intervals.py; Cython reads both. Plain Python never sees this file.
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy, memset


cdef extern from "pythread.h":
    unsigned long thread_ident "PyThread_get_thread_ident"() noexcept

# A block is a `bytes` object that we write to while no other code has it. The garbage collector does not track it, so
# allocating one cannot start a collection, and numpy reads it without a copy.

cdef inline bytes new_block(Py_ssize_t length):
    # Not zeroed: that would touch every page at once, about 2 us each.
    return PyBytes_FromStringAndSize(NULL, 8 * length)


cdef inline bytes zeroed_block(Py_ssize_t length):
    cdef bytes block = PyBytes_FromStringAndSize(NULL, 8 * length)
    memset(PyBytes_AS_STRING(block), 0, 8 * length)
    return block


cdef inline bytes copied_block(int64_t* ints, Py_ssize_t length):
    cdef bytes block = PyBytes_FromStringAndSize(NULL, 8 * length)
    # The empty `bytes` is shared.
    if length:
        memcpy(PyBytes_AS_STRING(block), ints, 8 * length)
    return block


cdef inline int64_t* ints_of(object block) noexcept:
    return <int64_t*><void*>PyBytes_AS_STRING(block)


cdef inline Py_ssize_t ints_in(object block) noexcept:
    return PyBytes_GET_SIZE(block) // 8


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


@cython.locals(shift=int)
cdef Py_ssize_t bin_of(int64_t duration) noexcept


@cython.locals(
    fresh=bytes, new="int64_t*", old="int64_t*", known=Py_ssize_t, place=Py_ssize_t, first=Py_ssize_t, beyond=Py_ssize_t
)
cpdef tuple new_counts(bytes counts, bytes earlier, Py_ssize_t at)


# The kernel's account of the calling thread, see ProcessorTimes. None of it calls into Python.
cdef extern from *:
    """
    #if defined(__linux__)
      #include <fcntl.h>
      #include <stdlib.h>
      #include <time.h>
      #include <unistd.h>
      static int d5_open_times(void) { return open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC); }
      static int d5_read_times(int file, int64_t *ran, int64_t *waited) {
          char text[96], *at = text;
          ssize_t length = file < 0 ? -1 : pread(file, text, sizeof(text) - 1, 0);
          if (length <= 0) return 0;
          text[length] = 0;
          *ran = strtoll(at, &at, 10);
          *waited = strtoll(at, &at, 10);
          return 1;
      }
      static void d5_close_times(int file) { close(file); }
      static int64_t d5_time_now(void) {
          struct timespec now;
          clock_gettime(CLOCK_MONOTONIC, &now);
          return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
      }
    #else
      static int d5_open_times(void) { return -1; }
      static int d5_read_times(int file, int64_t *ran, int64_t *waited) { return 0; }
      static void d5_close_times(int file) {}
      static int64_t d5_time_now(void) { return 0; }
    #endif
    """
    int open_times "d5_open_times"() noexcept
    bint read_times "d5_read_times"(int file, int64_t* ran, int64_t* waited) noexcept
    void close_times "d5_close_times"(int file) noexcept
    int64_t time_now "d5_time_now"() noexcept


@cython.final
@cython.no_gc
cdef class Aggregates:
    cdef bytes bins
    cdef Py_ssize_t first_bin
    cdef int64_t count
    cdef object total_ns
    cdef int64_t min_ns
    cdef int64_t max_ns
    cdef double mean_ns
    cdef double m2

    @cython.locals(
        bins="int64_t*", i=Py_ssize_t, begin=Py_ssize_t, duration=int64_t, low=int64_t, high=int64_t, total=uint64_t,
        added=double, number=Py_ssize_t, before=double, sum_ns=double, mean_ns=double, drift=double, m2=double,
        delta=double, share=double
    )
    cdef add(self, int64_t* ints, Py_ssize_t length, Py_ssize_t width, int64_t skip_first)
    @cython.locals(
        known=Py_ssize_t, first=Py_ssize_t, beyond=Py_ssize_t, fresh=bytes, old="int64_t*", new="int64_t*",
        place=Py_ssize_t
    )
    cdef make_room(self, Py_ssize_t slot)
    @cython.locals(low=Py_ssize_t, beyond=Py_ssize_t)
    cdef tuple counts(self, int64_t skip_first)


cdef class ProcessorTimes


@cython.final
cdef class Intervals:
    cdef int64_t* place
    cdef int64_t* end
    cdef bytes block
    cdef list blocks
    cdef Aggregates aggregates
    cdef Py_ssize_t kept_in_blocks
    cdef int64_t dropped
    cdef int64_t taken
    cdef public ProcessorTimes processor
    cdef readonly Py_ssize_t width
    cdef readonly Py_ssize_t keep_last
    cdef readonly Py_ssize_t skip_first
    cdef public int64_t failed
    cdef public int64_t discarded
    cdef public int64_t captured
    cdef public int64_t recomputed

    cpdef int append(
        self, int64_t start_ns, int64_t end_ns, int64_t host_start_ns=*, int64_t host_end_ns=*
    ) except -1
    @cython.locals(full=bytes, fresh=bytes, length=Py_ssize_t, seen=Py_ssize_t, width=Py_ssize_t)
    cdef int flush_compiled(self) except -1
    @cython.locals(surplus=int64_t)
    cdef bint _is_surplus(self, int64_t kept, int64_t dropped, int64_t block) except -1
    @cython.locals(parts=list)
    cpdef tuple kept(self)
    @cython.locals(
        aggregates=Aggregates, place=Py_ssize_t, ahead=int64_t, number=Py_ssize_t, block=bytes, seen=Py_ssize_t,
        length=Py_ssize_t, width=Py_ssize_t
    )
    cpdef tuple digest(self)
    @cython.locals(parts=list)
    cpdef tuple since(self, int64_t taken)
    cpdef took(self, int64_t taken)


@cython.final
cdef class ProcessorTimes:
    cdef readonly Intervals rows
    cdef readonly unsigned long ident
    cdef public int file
    cdef int64_t read_ns

    cpdef read(self, int64_t end_ns)
    @cython.locals(is_open=bint, file=int)
    cpdef close(self)


cdef inline int keep(Intervals intervals, int64_t start_ns, int64_t end_ns) except -1:
    # Intervals.append for the host, inlined.
    cdef int64_t* place = intervals.place
    place[0] = start_ns
    place[1] = end_ns
    intervals.place = place + 2
    if place + 2 == intervals.end:
        intervals.flush_compiled()
    if intervals.processor is not None:
        intervals.processor.read(end_ns)
    return 0


cdef inline int keep_on_device(
    Intervals intervals, int64_t start_ns, int64_t end_ns, int64_t host_start_ns, int64_t host_end_ns
) except -1:
    cdef int64_t* place = intervals.place
    place[0] = start_ns
    place[1] = end_ns
    place[2] = host_start_ns
    place[3] = host_end_ns
    intervals.place = place + 4
    if place + 4 == intervals.end:
        intervals.flush_compiled()
    return 0


cdef inline bint keep_times(ProcessorTimes times) except -1:
    cdef int64_t ran = 0, waited = 0
    if not read_times(times.file, &ran, &waited):
        return False
    keep_on_device(times.rows, time_now(), ran, waited, 0)
    return True
