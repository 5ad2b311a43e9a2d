# C types of recorder.py; Cython reads both. Plain Python never sees this file.
cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from deep500_timing._recording.intervals cimport Intervals, keep

cdef extern from *:
    """
    #if defined(__linux__)
      #include <time.h>
      /* What time.perf_counter_ns() reads on Linux. */
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
      /* PyThread_get_thread_ident() without the calls into the interpreter and the C library. */
      static inline unsigned long d5_thread_id(void) {
      #if defined(__x86_64__) && !defined(__ILP32__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 11
          return (unsigned long)__builtin_thread_pointer();
      #else
          return (unsigned long)pthread_self();
      #endif
      }
    #else
      static inline unsigned long d5_thread_id(void) { return PyThread_get_thread_ident(); }
    #endif
    """
    unsigned long thread_id "d5_thread_id"() noexcept

cdef extern from *:
    """
    /* A C type's dict may be changed by the module that creates the type. */
    static inline PyObject *d5_type_dict(PyObject *type) {
        PyObject *dict = ((PyTypeObject *)type)->tp_dict;
        Py_INCREF(dict);
        return dict;
    }
    static inline void d5_type_modified(PyObject *type) { PyType_Modified((PyTypeObject *)type); }

    /* The interpreter calls these slots and methods directly, without the code that Cython puts around its own. */
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
    /* Put a fast path before a method that Cython made, and return the method, which is its slow path. A method that
       Cython makes in another way stays as it is. */
    typedef PyObject *(*d5_method)(PyObject *, PyObject **, Py_ssize_t, PyObject *);
    static d5_method d5_slow_start, d5_slow_end, d5_slow_region;
    static inline d5_method d5_put_before(PyObject *type, PyObject *name, void *fast) {
        PyObject *found = PyDict_GetItemWithError(((PyTypeObject *)type)->tp_dict, name);
        PyMethodDef *method;
        d5_method slow;
        if (!found || !Py_IS_TYPE(found, &PyMethodDescr_Type)) return NULL;
        method = ((PyMethodDescrObject *)found)->d_method;
        if (method->ml_flags != (METH_FASTCALL | METH_KEYWORDS)) return NULL;
        slow = (d5_method)(void *)method->ml_meth;
        method->ml_meth = (PyCFunction)fast;
        return slow;
    }
    #define d5_call(method, timer, arguments, count, names) method(timer, arguments, count, names)
    """
    ctypedef void* Method "d5_method"
    Method slow_start "d5_slow_start"
    Method slow_end "d5_slow_end"
    Method slow_region "d5_slow_region"
    Method put_before "d5_put_before"(object, object, void*)
    object call "d5_call"(Method, object, PyObject**, Py_ssize_t, PyObject*)

cdef extern from *:
    """
    /* After a look-up without a result: an unhashable key has no region; any other error is raised. */
    static inline int d5_forget_type_error(void) {
        if (!PyErr_Occurred()) return 0;
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    """
    int forget_type_error "d5_forget_type_error"() except -1


cdef inline size_t slot_of(PyObject* key) noexcept:
    return (<size_t>key >> 3) & 30


cdef inline PyObject* cached_region(PyObject* regions, PyObject* key) noexcept:
    # A key has two slots in one cache line, so that two keys with the same slot do not displace each other.
    cdef PyObject** cache = (<ThreadRegions>regions).cache
    cdef size_t slot = slot_of(key)
    if cache[slot] == key:
        return cache[slot + 1]
    if cache[slot ^ 2] == key:
        return cache[(slot ^ 2) + 1]
    return NULL


cdef inline Region look_up(ThreadRegions regions, object key):
    # The cache compares by identity. It holds only keys that are in the dict itself, so that none is freed and its
    # address reused by another.
    cdef PyObject* found = cached_region(<PyObject*>regions, <PyObject*>key)
    cdef size_t slot
    if found is not NULL:
        return <Region>found
    found = PyDict_GetItemWithError(regions.by_key, key)
    if found is NULL:
        forget_type_error()
        return None
    if (<Region>found)._key is key:
        slot = slot_of(<PyObject*>key)
        if regions.cache[slot] is not NULL:
            slot ^= 2
        regions.cache[slot] = <PyObject*>key
        regions.cache[slot + 1] = found
    return <Region>found


@cython.final
cdef class Region:
    # In the order in which a start and an end read them.
    cdef Recorder _timer
    cdef readonly ThreadRegions _thread
    cdef bint _is_open
    cdef bint _end_has_more
    cdef readonly int64_t _start_ns
    cdef object _open_pair
    cdef readonly Intervals _intervals
    # Set by cached_method.
    cdef object bound_enter
    cdef object bound_exit
    cdef list _suspended
    cdef object _watcher
    cdef object _key
    cdef str _name
    cdef unsigned long _generation
    cdef readonly Intervals _device_intervals
    cdef readonly object _pair
    cdef object _device_handle

    cdef _set_up(self, object key, str name, ThreadRegions thread, Recorder timer)
    @cython.locals(timer=Recorder, region=Region)
    cpdef start(self)
    @cython.locals(timer=Recorder, region=Region, now_ns=int64_t)
    cpdef end(self)
    @cython.locals(timer=Recorder)
    cdef _open(self)
    @cython.locals(start_ns=int64_t)
    cdef _close(self, int64_t now_ns)
    @cython.locals(timer=Recorder, region=Region)
    cpdef _fail(self)
    cpdef Intervals _device_store(self)
    cpdef _open_at(self, int64_t start_ns)
    @cython.locals(start_ns=int64_t)
    cpdef int64_t _keep_until(self, int64_t end_ns) except? -1
    cpdef bint _ignores_end(self)


@cython.final
cdef class CachedMethod:
    cdef object method
    cdef bint is_exit


# What a start and an end usually do, without a call into Python; they return False where more is to be done.

cdef inline bint open_region(PyObject* timer, PyObject* region) noexcept:
    if not (<Recorder>timer)._native or (<Region>region)._is_open:
        return False
    (<Region>region)._start_ns = clock_ns()
    (<Region>region)._is_open = True
    return True


cdef inline bint close_region(PyObject* region, int64_t now_ns) except -1:
    if not (<Region>region)._is_open or (<Region>region)._open_pair is not None or (<Region>region)._end_has_more:
        return False
    (<Region>region)._is_open = False
    keep((<Region>region)._intervals, (<Region>region)._start_ns, now_ns)
    return True


cdef inline object fast_enter "d5_fast_enter"(object region, PyObject* nothing):
    # Region.__enter__
    if not (<Region>region)._timer._enabled:
        return region
    if thread_id() == (<Region>region)._thread.ident and open_region(<PyObject*>(<Region>region)._timer, <PyObject*>region):
        return region
    return Region.__enter__(region)


cdef inline object fast_exit "d5_fast_exit"(object region, PyObject** error, Py_ssize_t count):
    # Region.__exit__
    cdef int64_t now_ns
    if count == 3 and error[0] is <PyObject*>None:
        if not (<Region>region)._timer._enabled:
            return None
        if (<Region>region)._timer._native:
            now_ns = clock_ns()
            if thread_id() == (<Region>region)._thread.ident and close_region(<PyObject*>region, now_ns):
                return None
    return Region.__exit__(region, *[<object>error[place] for place in range(count)])


cdef inline object cached_method "d5_cached_method"(object method, object region, object owner):
    # CachedMethod.__get__. There is no region if the interpreter asks the class.
    if <PyObject*>region is NULL or not is_of(region, Region):
        return (<CachedMethod>method).__get__(None if <PyObject*>region is NULL else region, owner)
    if (<CachedMethod>method).is_exit:
        if (<Region>region).bound_exit is None:
            (<Region>region).bound_exit = bound_exit(region, <void*>fast_exit)
        return (<Region>region).bound_exit
    if (<Region>region).bound_enter is None:
        (<Region>region).bound_enter = bound_enter(region, <void*>fast_enter)
    return (<Region>region).bound_enter


cdef inline cache_methods(object kind):
    set_descr_get(CachedMethod, <void*>cached_method)
    names = type_dict(kind)
    names["__enter__"] = CachedMethod(names["__enter__"], False)
    names["__exit__"] = CachedMethod(names["__exit__"], True)
    type_modified(kind)


@cython.final
cdef class ThreadRegions:
    cdef object __weakref__
    cdef public unsigned long ident
    # Sixteen keys, each followed by its region.
    cdef PyObject* cache[32]
    cdef public dict by_key
    cdef public object watch

    @cython.locals(region=Region)
    cpdef release(self)


cdef class Recorder:
    cdef bint _enabled
    cdef bint _native
    cdef ThreadRegions _current
    cdef object _now
    cdef public object _clock
    cdef public list _all_threads
    cdef public dict _threads
    cdef public dict _set_aside
    cdef public dict _memory_at_ends
    cdef public object _run
    cdef object _watcher
    cdef object _watched
    cdef public unsigned long _generation
    cdef public bint _logged
    cdef Py_ssize_t _keep_last
    cdef Py_ssize_t _skip_first
    cdef object __weakref__

    cdef _set_up(self)
    cpdef Intervals _new_intervals(self, Region region)
    cpdef _watch(self, Region region, Intervals intervals)
    cdef int64_t _read_clock(self) except? -1
    cpdef Region _find(self, object key)
    cpdef _keep(self, object key, int64_t start_ns, int64_t end_ns)
    cdef ThreadRegions _enter_thread(self)
    cdef ThreadRegions _new_store(self, unsigned long ident)
    cdef Region _new_region(self, object key, ThreadRegions regions)
    cdef _start_of_open(self, Region region)
    cpdef _call_at_end(self, object function, object names)
    cdef _after_end(self, Region region)
    cdef _resume(self, Region region)
    cdef _end_of_closed(self, Region region)
    cdef _mismatch(self, Region region, bint gpu)
    cpdef _discard_all(self, Region region)
    cdef bint _forget_with_end(self, Region region, str counter) except -1
    cpdef _forget_open(self, Region region, str counter)
    cpdef _take_back(self, Region region, object pair)


# Fast paths of Timer.start, end and region, for one positional key that the calling thread has used before. Without them
# a pair costs 0.98 of two clock reads instead of 0.88: Cython's own wrappers parse keyword arguments first.

cdef inline PyObject* known_region(PyObject* timer, PyObject* key) noexcept:
    cdef PyObject* regions = <PyObject*>(<Recorder>timer)._current
    if thread_id() != (<ThreadRegions>regions).ident:
        return NULL
    return cached_region(regions, key)


cdef inline object fast_start "d5_fast_start"(object timer, PyObject** arguments, Py_ssize_t count, PyObject* names):
    cdef PyObject* region
    if count == 1 and names is NULL:
        if not (<Recorder>timer)._enabled:
            return None
        region = known_region(<PyObject*>timer, arguments[0])
        if region is not NULL and open_region(<PyObject*>timer, region):
            return None
    return call(slow_start, timer, arguments, count, names)


cdef inline object fast_end "d5_fast_end"(object timer, PyObject** arguments, Py_ssize_t count, PyObject* names):
    cdef PyObject* region
    cdef int64_t now_ns
    if count == 1 and names is NULL:
        if not (<Recorder>timer)._enabled:
            return None
        if (<Recorder>timer)._native:
            now_ns = clock_ns()
            region = known_region(<PyObject*>timer, arguments[0])
            if region is not NULL and close_region(region, now_ns):
                return None
    return call(slow_end, timer, arguments, count, names)


cdef inline object fast_region "d5_fast_region"(object timer, PyObject** arguments, Py_ssize_t count, PyObject* names):
    cdef PyObject* region
    if count == 1 and names is NULL:
        region = known_region(<PyObject*>timer, arguments[0])
        if region is not NULL:
            return <object>region
    return call(slow_region, timer, arguments, count, names)


cdef inline void add_fast_paths(object timer) noexcept:
    global slow_start, slow_end, slow_region
    slow_start = put_before(timer, "start", <void*>fast_start)
    slow_end = put_before(timer, "end", <void*>fast_end)
    slow_region = put_before(timer, "region", <void*>fast_region)
