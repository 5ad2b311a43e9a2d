# C types of recorder.py; Cython reads both. Plain Python never sees this file.
cimport cython
from cpython.exc cimport PyErr_Clear
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from deep500_timing._recording.intervals cimport Intervals

cdef extern from *:
    """
    #if defined(__linux__)
      #include <time.h>
      /* What time.perf_counter_ns() reads on Linux, without the call through Python. */
      static inline long long d5_clock_ns(void) {
          struct timespec now;
          clock_gettime(CLOCK_MONOTONIC, &now);
          return (long long)now.tv_sec * 1000000000LL + now.tv_nsec;
      }
    #elif PY_VERSION_HEX >= 0x030D0000
      static inline long long d5_clock_ns(void) {
          PyTime_t now;
          if (PyTime_PerfCounterRaw(&now) < 0) return 0;
          return (long long)now;
      }
    #else
      static inline long long d5_clock_ns(void) { return (long long)_PyTime_GetPerfCounter(); }
    #endif
    """
    long long clock_ns "d5_clock_ns"() noexcept
    unsigned long thread_id "PyThread_get_thread_ident"() noexcept
    PyObject* PyDict_GetItemWithError(object, object) noexcept

cdef extern from *:
    """
    /* Python lets nobody assign to a type of C; the module that makes it may, before anybody has seen it. */
    static inline PyObject *d5_type_dict(PyObject *type) {
        PyObject *dict = ((PyTypeObject *)type)->tp_dict;
        Py_INCREF(dict);
        return dict;
    }
    static inline void d5_type_modified(PyObject *type) { PyType_Modified((PyTypeObject *)type); }
    """
    dict type_dict "d5_type_dict"(object)
    void type_modified "d5_type_modified"(object)


cdef inline Region look_up(Lane lane, object key):
    # By identity first: a lane remembers where it found the keys that it uses. Only keys that its dict holds
    # themselves are remembered, so that none is freed and its address used for another.
    cdef size_t place = (<size_t><PyObject*>key >> 4) & 15
    if lane.known_keys[place] == <PyObject*>key:
        return <Region>lane.known_regions[place]
    cdef PyObject* found = PyDict_GetItemWithError(lane.regions, key)
    if found is NULL:
        PyErr_Clear()  # An unhashable key is found out by who makes regions.
        return None
    if (<Region>found).key is key:
        lane.known_keys[place] = <PyObject*>key
        lane.known_regions[place] = found
    return <Region>found


@cython.final
cdef class Region:
    cdef readonly object key
    cdef readonly str name
    cdef public bint is_open
    cdef public int64_t start_ns
    cdef public Intervals intervals
    cdef readonly Lane lane
    cdef Recorder timer
    cdef public unsigned long generation
    # What the device side keeps here.
    cdef public Intervals gpu_intervals
    cdef public object gpu_handle
    cdef public object pair
    cdef public bint gpu
    # What KeptMethod keeps here.
    cdef object kept_enter
    cdef object kept_exit

    @cython.locals(timer=Recorder, region=Region)
    cpdef start(self)
    @cython.locals(timer=Recorder, region=Region, intervals=Intervals, now_ns=int64_t, index=Py_ssize_t)
    cpdef end(self)
    cpdef fail(self)
    cpdef Intervals gpu_store(self)


@cython.final
cdef class KeptMethod:
    cdef object method
    cdef bint is_exit


cdef inline keep_methods(object kind):
    names = type_dict(kind)
    names["__enter__"] = KeptMethod(names["__enter__"], False)
    names["__exit__"] = KeptMethod(names["__exit__"], True)
    type_modified(kind)


@cython.final
cdef class Lane:
    cdef object __weakref__
    cdef public unsigned long thread
    cdef public dict regions
    cdef public object owner
    cdef PyObject* known_keys[16]
    cdef PyObject* known_regions[16]

    @cython.locals(region=Region)
    cpdef vacate(self)


cdef class Recorder:
    cdef bint _enabled
    cdef bint _native
    cdef Lane _lane
    cdef object _now
    cdef public object _clock
    cdef public dict _lanes
    cdef public dict _memory_at_ends
    cdef public object _run
    cdef public unsigned long _generation
    cdef readonly Py_ssize_t keep_last
    cdef readonly Py_ssize_t skip_first
    cdef object __weakref__

    cpdef Region _find(self, object key)
    cdef Lane _enter_thread(self)
    cdef Lane _adopt_lane(self, unsigned long thread)
    cdef Region _new_region(self, object key, Lane lane)
    cdef _start_of_open(self, Region region)
    cdef _end_of_closed(self, Region region)
    cdef _mismatch(self, Region region, bint gpu)
    cpdef _discard(self, Region region)
    cpdef _forget_open(self, Region region)
