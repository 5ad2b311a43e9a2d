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
      /* What PyThread_get_thread_ident() returns there, without the call into the interpreter; and where the C library
         is known to keep it in a register, without the call into that, whose code is in no cache inside a step. */
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
    /* Of a method that Cython made: another function in its place, which falls back on it. */
    static inline void *d5_put_before(PyObject *type, PyObject *name, int flags, void *shorter) {
        PyObject *found = PyDict_GetItemWithError(((PyTypeObject *)type)->tp_dict, name);
        PyMethodDef *method;
        void *longer;
        if (!found || !Py_IS_TYPE(found, &PyMethodDescr_Type)) return NULL;
        method = ((PyMethodDescrObject *)found)->d_method;
        if (method->ml_flags != flags) return NULL;
        longer = (void *)method->ml_meth;
        method->ml_meth = (PyCFunction)shorter;
        return longer;
    }
    typedef PyObject *(*d5_method)(PyObject *, PyObject **, Py_ssize_t, PyObject *);
    static d5_method d5_start, d5_end, d5_region;
    static PyCFunction d5_open, d5_close;
    #define d5_call(method, timer, arguments, count, names) method(timer, arguments, count, names)
    #define d5_call_of(method, region) method(region, NULL)
    """
    const int METH_NOARGS
    const int METH_FASTCALL
    const int METH_KEYWORDS
    ctypedef void* Method "d5_method"
    Method longer_start "d5_start"
    Method longer_end "d5_end"
    Method longer_region "d5_region"
    ctypedef void* MethodOfRegion "PyCFunction"
    MethodOfRegion longer_open "d5_open"
    MethodOfRegion longer_close "d5_close"
    void* put_before "d5_put_before"(object, object, int, void*)
    object call "d5_call"(Method, object, PyObject**, Py_ssize_t, PyObject*)
    object call_of "d5_call_of"(MethodOfRegion, object)

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


cdef extern from *:
    """
    #if defined(__GNUC__)
    /* What runs in each step lies together: a page of code that is touched nowhere else costs as much as a reading of
       the clock. */
    #define D5_TOGETHER __attribute__((hot, unused))
    static PyObject *d5_enter_short(PyObject *, PyObject *) D5_TOGETHER;
    static PyObject *d5_leave_short(PyObject *, PyObject **, Py_ssize_t) D5_TOGETHER;
    static PyObject *d5_kept_method(PyObject *, PyObject *, PyObject *) D5_TOGETHER;
    static PyObject *d5_short_open(PyObject *, PyObject *) D5_TOGETHER;
    static PyObject *d5_short_close(PyObject *, PyObject *) D5_TOGETHER;
    static PyObject *d5_short_start(PyObject *, PyObject **, Py_ssize_t, PyObject *) D5_TOGETHER;
    static PyObject *d5_short_end(PyObject *, PyObject **, Py_ssize_t, PyObject *) D5_TOGETHER;
    static PyObject *d5_short_region(PyObject *, PyObject **, Py_ssize_t, PyObject *) D5_TOGETHER;
    #endif
    """


cdef inline size_t place_of(PyObject* key) noexcept:
    return (<size_t>key >> 3) & 30


cdef inline PyObject* known_to(PyObject* regions, PyObject* key) noexcept:
    # Two places a key, both in one cache line: of two keys that are given the same, neither displaces the other.
    cdef PyObject** known = (<ThreadRegions>regions).known
    cdef size_t place = place_of(key)
    if known[place] == key:
        return known[place + 1]
    if known[place ^ 2] == key:
        return known[(place ^ 2) + 1]
    return NULL


cdef inline Region look_up(ThreadRegions regions, object key):
    # By identity first: a thread's regions remember where they found the keys that it uses. Only keys that their dict
    # holds themselves are remembered, so that none is freed and its address used for another.
    cdef PyObject* found = known_to(<PyObject*>regions, <PyObject*>key)
    cdef size_t place
    if found is not NULL:
        return <Region>found
    found = PyDict_GetItemWithError(regions.by_key, key)
    if found is NULL:
        forget_type_error()
        return None
    if (<Region>found)._key is key:
        place = place_of(<PyObject*>key)
        if regions.known[place] is not NULL:
            place ^= 2
        regions.known[place] = <PyObject*>key
        regions.known[place + 1] = found
    return <Region>found


@cython.final
cdef class Region:
    # In the order in which a start and an end read them.
    cdef Recorder _timer
    cdef readonly ThreadRegions _thread
    cdef bint _is_open
    cdef readonly int64_t _start_ns
    cdef object _open_pair
    cdef tuple _suspended
    cdef readonly Intervals _intervals
    # What KeptMethod keeps here.
    cdef object kept_enter
    cdef object kept_exit
    cdef object _key
    cdef str _name
    cdef unsigned long _generation
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


cdef inline bint is_opened(Region region) noexcept:
    # Whether it was for the calling thread to open, and now is open. Its timer is enabled.
    if region._timer._native and not region._is_open and thread_id() == region._thread.ident:
        region._start_ns = clock_ns()
        region._is_open = True
        return True
    return False


cdef inline bint is_closed(Region region, int64_t now_ns) except -1:
    # Whether it was for the calling thread to close, as it was left, and now is closed.
    if (
        region._is_open
        and region._open_pair is None
        and region._suspended is None
        and thread_id() == region._thread.ident
    ):
        region._is_open = False
        keep(region._intervals, region._start_ns, now_ns)
        return True
    return False


cdef inline object enter "d5_enter_short"(object region, PyObject* nothing):
    # Region.__enter__, where nothing can raise.
    if not (<Region>region)._timer._enabled:
        return region
    if is_opened(<Region>region):
        return region
    return Region.__enter__(region)


cdef inline object leave "d5_leave_short"(object region, PyObject** error, Py_ssize_t count):
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
    if is_closed(<Region>region, now_ns):
        return None
    return (<Region>region).end()


cdef inline object kept_method "d5_kept_method"(object method, object region, object owner):
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
    # Sixteen keys, each beside its region: one cache line holds both.
    cdef PyObject* known[32]
    cdef public dict by_key
    cdef public object watch
    cdef public int64_t exception_ns
    cdef public int64_t exception_from_ns

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
    cdef object _at_end
    cdef object _at_end_of
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
    cpdef _call_at_end(self, object function, object names)
    cdef bint _is_watched(self, str name) except -1
    cdef _after_end(self, Region region)
    cdef _tell_end(self, Region region)
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


# The methods of a timer that are called most, where a key is their only argument and the calling thread, one of the last
# that were here, has used the key before: what they do in timer.py, past what Cython does to arguments and references.

cdef inline PyObject* known_region(PyObject* timer, PyObject* key) noexcept:
    cdef PyObject* regions = <PyObject*>(<Recorder>timer)._current
    cdef unsigned long ident = thread_id()
    if ident != (<ThreadRegions>regions).ident:
        regions = (<Recorder>timer).known_threads[(ident >> 12) & 7]
        if regions is NULL or (<ThreadRegions>regions).ident != ident:
            return NULL
    return known_to(regions, key)


cdef inline object short_start "d5_short_start"(object timer, PyObject** arguments, Py_ssize_t count, PyObject* names):
    cdef PyObject* region
    if count == 1 and names is NULL:
        if not (<Recorder>timer)._enabled:
            return None
        region = known_region(<PyObject*>timer, arguments[0])
        if region is not NULL and (<Recorder>timer)._native and not (<Region>region)._is_open:
            (<Region>region)._start_ns = clock_ns()
            (<Region>region)._is_open = True
            return None
    return call(longer_start, timer, arguments, count, names)


cdef inline object short_end "d5_short_end"(object timer, PyObject** arguments, Py_ssize_t count, PyObject* names):
    cdef PyObject* region
    cdef int64_t now_ns
    if count == 1 and names is NULL:
        if not (<Recorder>timer)._enabled:
            return None
        if (<Recorder>timer)._native:
            now_ns = clock_ns()
            region = known_region(<PyObject*>timer, arguments[0])
            if (
                region is not NULL
                and (<Region>region)._is_open
                and (<Region>region)._open_pair is None
                and (<Region>region)._suspended is None
            ):
                (<Region>region)._is_open = False
                keep((<Region>region)._intervals, (<Region>region)._start_ns, now_ns)
                return None
    return call(longer_end, timer, arguments, count, names)


cdef inline object short_region "d5_short_region"(object timer, PyObject** arguments, Py_ssize_t count, PyObject* names):
    cdef PyObject* region
    if count == 1 and names is NULL:
        region = known_region(<PyObject*>timer, arguments[0])
        if region is not NULL:
            return <object>region
    return call(longer_region, timer, arguments, count, names)


cdef inline object short_open "d5_short_open"(object region, PyObject* nothing):
    # Region.start
    if not (<Region>region)._timer._enabled:
        return None
    if is_opened(<Region>region):
        return None
    return call_of(longer_open, region)


cdef inline object short_close "d5_short_close"(object region, PyObject* nothing):
    # Region.end
    cdef int64_t now_ns
    if not (<Region>region)._timer._enabled:
        return None
    if (<Region>region)._timer._native:
        now_ns = clock_ns()
        if is_closed(<Region>region, now_ns):
            return None
    return call_of(longer_close, region)


cdef inline void* shorten(object kind, object name, int flags, void* shorter, void* longer) noexcept:
    # What the method did before; nothing is changed if Cython has made it in another way.
    cdef void* found = put_before(kind, name, flags, shorter)
    return longer if found is NULL else found


cdef inline void shorten_methods(object timer, object region):
    global longer_start, longer_end, longer_region, longer_open, longer_close
    cdef int flags = METH_FASTCALL | METH_KEYWORDS
    longer_start = <Method>shorten(timer, "start", flags, <void*>short_start, <void*>longer_start)
    longer_end = <Method>shorten(timer, "end", flags, <void*>short_end, <void*>longer_end)
    longer_region = <Method>shorten(timer, "region", flags, <void*>short_region, <void*>longer_region)
    longer_open = <MethodOfRegion>shorten(region, "start", METH_NOARGS, <void*>short_open, <void*>longer_open)
    longer_close = <MethodOfRegion>shorten(region, "end", METH_NOARGS, <void*>short_close, <void*>longer_close)
