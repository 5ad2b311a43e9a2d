# C types of recorder.py; Cython reads both. Plain Python never sees this file.
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from deep500_timing._recording.intervals cimport Intervals, keep

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
    PyObject* PyDict_GetItemWithError(object, object) noexcept

cdef extern from *:
    """
    #if defined(__linux__)
      #include <pthread.h>
      /* What PyThread_get_thread_ident() returns there, without the call into the interpreter. */
      static inline unsigned long d5_thread_id(void) { return (unsigned long)pthread_self(); }
    #else
      static inline unsigned long d5_thread_id(void) { return PyThread_get_thread_ident(); }
    #endif
    """
    unsigned long thread_id "d5_thread_id"() noexcept

cdef extern from *:
    """
    /* Python lets nobody assign to a type of C; the module that makes it may, before anybody has seen it. */
    static inline PyObject *d5_type_dict(PyObject *type) {
        PyObject *dict = ((PyTypeObject *)type)->tp_dict;
        Py_INCREF(dict);
        return dict;
    }
    static inline void d5_type_modified(PyObject *type) { PyType_Modified((PyTypeObject *)type); }

    /* Python's own way to a descriptor of ours, and to its methods, without what Cython puts before each. */
    static inline void d5_set_descr_get(PyObject *type, void *get) {
        ((PyTypeObject *)type)->tp_descr_get = (descrgetfunc)get;
    }
    static PyMethodDef d5_enter = {"__enter__", NULL, METH_NOARGS, "Open the region."};
    static PyMethodDef d5_exit = {"__exit__", NULL, METH_FASTCALL, "Close the region."};
    static inline PyObject *d5_bound_enter(PyObject *region, void *enter) {
        d5_enter.ml_meth = (PyCFunction)enter;
        return PyCFunction_NewEx(&d5_enter, region, NULL);
    }
    static inline PyObject *d5_bound_exit(PyObject *region, void *exit) {
        d5_exit.ml_meth = (PyCFunction)exit;
        return PyCFunction_NewEx(&d5_exit, region, NULL);
    }
    #define d5_is_of(thing, type) Py_IS_TYPE(thing, (PyTypeObject *)(type))
    """
    object bound_enter "d5_bound_enter"(object, void*)
    bint is_of "d5_is_of"(object, object)
    dict type_dict "d5_type_dict"(object)
    void type_modified "d5_type_modified"(object)
    void set_descr_get "d5_set_descr_get"(object, void*)
    object bound_exit "d5_bound_exit"(object, void*)

cdef extern from *:
    """
    /* After a look-up that found nothing: an unhashable key is none, whatever else was raised goes on. */
    static inline int d5_forget_type_error(void) {
        if (!PyErr_Occurred()) return 0;
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    """
    int forget_type_error "d5_forget_type_error"() except -1


cdef inline Region look_up(ThreadRegions regions, object key):
    # By identity first: a thread's regions remember where they found the keys that it uses. Only keys that their dict
    # holds themselves are remembered, so that none is freed and its address used for another.
    cdef size_t place = (<size_t><PyObject*>key >> 4) & 15
    if regions.known_keys[place] == <PyObject*>key:
        return <Region>regions.known_regions[place]
    cdef PyObject* found = PyDict_GetItemWithError(regions.by_key, key)
    if found is NULL:
        forget_type_error()
        return None
    if (<Region>found)._key is key:
        regions.known_keys[place] = <PyObject*>key
        regions.known_regions[place] = found
    return <Region>found


@cython.final
cdef class Region:
    # In the order in which a start and an end read them.
    cdef Recorder _timer
    cdef readonly ThreadRegions _thread
    cdef bint _is_open
    cdef readonly int64_t _start_ns
    cdef object _open_pair
    cdef readonly Intervals _intervals
    # What KeptMethod keeps here.
    cdef object kept_enter
    cdef object kept_exit
    cdef object _key
    cdef str _name
    cdef unsigned long _generation
    cdef tuple _suspended
    cdef public Py_ssize_t _timed_depth
    cdef int64_t _interrupted_ns
    cdef readonly Intervals _device_intervals
    cdef readonly object _pair
    cdef object _device_handle

    cdef _set_up(self, object key, str name, ThreadRegions thread, Recorder timer)
    @cython.locals(timer=Recorder, region=Region)
    cpdef start(self)
    @cython.locals(timer=Recorder, region=Region, intervals=Intervals, now_ns=int64_t, start_ns=int64_t, place="int64_t*")
    cpdef end(self)
    @cython.locals(timer=Recorder, region=Region)
    cpdef _leave_by_exception(self)
    cpdef _fail(self)
    cpdef Intervals _device_store(self)
    cpdef _open_at(self, int64_t start_ns)
    @cython.locals(start_ns=int64_t)
    cpdef int64_t _keep_until(self, int64_t end_ns) except? -1
    cpdef int64_t _opened_ns(self)
    cpdef bint _ignores_end(self)


@cython.final
cdef class KeptMethod:
    cdef object method
    cdef bint is_exit


cdef inline object enter(object region, PyObject* nothing):
    # Region.__enter__, where nothing can raise.
    if not (<Region>region)._timer._enabled:
        return region
    if (
        (<Region>region)._timer._native
        and not (<Region>region)._is_open
        and thread_id() == (<Region>region)._thread.ident
    ):
        (<Region>region)._start_ns = clock_ns()
        (<Region>region)._is_open = True
        return region
    return Region.__enter__(region)


cdef inline object leave(object region, PyObject** error, Py_ssize_t count):
    # Region.__exit__, where no exception ends the block and the region is open as it was left.
    cdef int64_t now_ns
    if count != 3:
        return Region.__exit__(region, *[<object>error[place] for place in range(count)])
    if error[0] is not <PyObject*>None:
        return (<Region>region)._leave_by_exception()
    if not (<Region>region)._timer._enabled:
        return None
    if not (<Region>region)._timer._native:
        return (<Region>region).end()
    now_ns = clock_ns()
    if (
        (<Region>region)._is_open
        and (<Region>region)._open_pair is None
        and (<Region>region)._suspended is None
        and thread_id() == (<Region>region)._thread.ident
    ):
        (<Region>region)._is_open = False
        keep((<Region>region)._intervals, (<Region>region)._start_ns, now_ns)
        return None
    return (<Region>region).end()


cdef inline object kept_method(object method, object region, object owner):
    # KeptMethod.__get__, where the interpreter asks. There is no region if it asks the type.
    if <PyObject*>region is NULL or not is_of(region, Region):
        return (<KeptMethod>method).__get__(None if <PyObject*>region is NULL else region, owner)
    if (<KeptMethod>method).is_exit:
        if (<Region>region).kept_exit is None:
            (<Region>region).kept_exit = bound_exit(region, <void*>leave)
        return (<Region>region).kept_exit
    if (<Region>region).kept_enter is None:
        (<Region>region).kept_enter = bound_enter(region, <void*>enter)
    return (<Region>region).kept_enter


cdef inline keep_methods(object kind):
    set_descr_get(KeptMethod, <void*>kept_method)
    names = type_dict(kind)
    names["__enter__"] = KeptMethod(names["__enter__"], False)
    names["__exit__"] = KeptMethod(names["__exit__"], True)
    type_modified(kind)


@cython.final
cdef class ThreadRegions:
    cdef object __weakref__
    cdef public unsigned long ident
    cdef public dict by_key
    cdef public object watch
    cdef public int64_t exception_ns
    cdef public int64_t exception_from_ns
    cdef PyObject* known_keys[16]
    cdef PyObject* known_regions[16]

    @cython.locals(region=Region)
    cpdef release(self)


cdef class Recorder:
    cdef bint _enabled
    cdef bint _native
    cdef ThreadRegions _current
    # Those of the last threads that were here, each in the place that its identity gives it.
    cdef PyObject* known_threads[8]
    cdef object _now
    cdef public object _clock
    cdef public dict _threads
    cdef public dict _set_aside
    cdef public dict _memory_at_ends
    cdef public object _run
    cdef public unsigned long _generation
    cdef public bint _logged
    cdef Py_ssize_t _keep_last
    cdef Py_ssize_t _skip_first
    cdef object __weakref__

    cdef _set_up(self)
    cpdef Intervals _new_intervals(self)
    cdef int64_t _read_clock(self) except? -1
    @cython.locals(region=Region)
    cdef int64_t _read_clock_at_end(self, object key) except? -1
    cpdef Region _find(self, object key)
    cdef ThreadRegions _enter_thread(self)
    @cython.locals(free=ThreadRegions)
    cdef ThreadRegions _reuse_regions(self, unsigned long ident)
    cdef Region _new_region(self, object key, ThreadRegions regions)
    cpdef _start_of_open(self, Region region, bint always)
    @cython.locals(thread=ThreadRegions, interrupted=bint)
    cdef _make_way(self, Region region, bint always)
    cdef bint _resume(self, Region region) except -1
    @cython.locals(other=Region)
    cdef _end_of_closed(self, Region region)
    cdef _mismatch(self, Region region, bint gpu)
    cpdef _discard(self, Region region)
    cpdef _discard_all(self, Region region)
    @cython.locals(intervals=Intervals, on_device=Intervals)
    cpdef _forget_open(self, Region region, int counted)
    cpdef _take_back(self, Region region, object pair)


cdef inline ThreadRegions known_regions_of(Recorder recorder):
    cdef unsigned long ident = thread_id()
    cdef PyObject* known = recorder.known_threads[(ident >> 12) & 7]
    if known is not NULL and (<ThreadRegions>known).ident == ident:
        return <ThreadRegions>known
    return None


cdef inline remember_regions(Recorder recorder, ThreadRegions regions):
    # The pointer is borrowed from the recorder's dict.
    recorder.known_threads[(regions.ident >> 12) & 7] = <PyObject*>regions


cdef inline forget_regions(Recorder recorder):
    cdef int place
    for place in range(8):
        recorder.known_threads[place] = NULL
