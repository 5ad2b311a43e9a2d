# C types of calls.py; Cython reads both. Plain Python never sees this file.
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_CheckExact, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from deep500_timing._recording.recorder cimport clock_ns, thread_id


cdef extern from *:
    """
    /* Python's own way to call what is called often: without a tuple and a dict for the arguments. */
    static inline void d5_call_by_vector(PyObject *type, Py_ssize_t offset) {
        ((PyTypeObject *)type)->tp_vectorcall_offset = offset;
        ((PyTypeObject *)type)->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
        PyType_Modified((PyTypeObject *)type);
    }
    #define d5_call_on(function, args, flags, names) PyObject_Vectorcall(function, (PyObject *const *)(args), flags, names)
    #define d5_vector_of(function) ((vectorcallfunc)(function))

    /* The first argument as a label: -1 if it is no whole number, or none of 64 bits. */
    static inline long long d5_label_of(PyObject **args, size_t flags) {
        int overflow;
        if (!PyVectorcall_NARGS(flags) || !PyLong_CheckExact(args[0])) return -1;
        return PyLong_AsLongLongAndOverflow(args[0], &overflow);
    }
    """
    ctypedef void* Vector "vectorcallfunc"
    void call_by_vector "d5_call_by_vector"(object, Py_ssize_t)
    object call_on "d5_call_on"(object, PyObject**, size_t, PyObject*)
    Vector vector_of "d5_vector_of"(void*)
    long long label_of "d5_label_of"(PyObject**, size_t) noexcept
    Py_ssize_t PyVectorcall_NARGS(size_t) noexcept
    Py_ssize_t PyTuple_GET_SIZE(PyObject*) noexcept
    PyObject* PyTuple_GET_ITEM(PyObject*, Py_ssize_t) noexcept
    int PyObject_RichCompareBool(PyObject*, object, int) except -1
    int PyObject_IsTrue(PyObject*) except -1
    const int Py_EQ


cdef extern from *:
    """
    #if defined(__GNUC__)
    /* What runs in each step lies together, see recorder.pxd. */
    #define D5_CALLS_TOGETHER __attribute__((hot, unused))
    static PyObject *d5_timed_call(PyObject *, PyObject **, size_t, PyObject *) D5_CALLS_TOGETHER;
    static PyObject *d5_noted_items(PyObject *, PyObject **, size_t, PyObject *) D5_CALLS_TOGETHER;
    static PyObject *d5_timed_issue(PyObject *, PyObject **, size_t, PyObject *) D5_CALLS_TOGETHER;
    static PyObject *d5_timed_waits(PyObject *, PyObject **, size_t, PyObject *) D5_CALLS_TOGETHER;
    #endif
    """


cdef list _running

# What a row is that is no call, see calls.py. The compiler writes the numbers where the names stand; a variable of the
# module would be one more line of memory in each step.
cdef enum:
    MADE = -1
    SENT = -2
    ISSUED = -3
    AWAITED = -4


@cython.final
cdef class CallLog:
    # In the order in which a call reads them.
    cdef readonly bint active
    cdef object clock
    cdef int64_t* place
    cdef int64_t* end_of_block
    cdef bytes block
    cdef readonly unsigned long thread

    cpdef int64_t now_ns(self) except? -1
    cpdef note(self, int64_t code, int64_t label, int64_t start_ns, int64_t end_ns, int64_t ordinal=*)
    @cython.locals(block=bytes, first="int64_t*", last="int64_t*", rows=list)
    cpdef list raw(self)
    @cython.locals(code=int64_t, rows=list, row=tuple, found=list, made=dict, handles=dict, sent=list, things=list,
                   turn=Py_ssize_t, foreign=bint)
    cpdef list take(self, object going=*, object unknown=*)


@cython.locals(log=CallLog, thread="unsigned long")
cpdef CallLog log_of_this_thread()


cdef class StandIn:
    cdef readonly object __wrapped__
    cdef CallLog log
    cdef Vector vector


@cython.final
cdef class TimedCall(StandIn):
    cdef int64_t code
    cdef int64_t otherwise
    cdef object keyword


@cython.final
cdef class NotedItems(StandIn):
    cdef int64_t issued
    cdef int64_t waited


@cython.final
cdef class TimedIssue(StandIn):
    cdef bint idle


@cython.final
cdef class TimedWaits(StandIn):
    cdef bint singly


cdef inline bytes block_of_rows(Py_ssize_t rows):
    # Touched as it is used, see intervals.pxd.
    return PyBytes_FromStringAndSize(NULL, 40 * rows)


cdef inline Py_ssize_t rows_in(object block) noexcept:
    return PyBytes_GET_SIZE(block) // 40


cdef inline int64_t* row_of(object block, Py_ssize_t row) noexcept:
    return <int64_t*><void*>PyBytes_AS_STRING(block) + 5 * row


cdef inline int make_room(CallLog log) except -1:
    cdef Py_ssize_t rows = rows_in(log.block)
    cdef bytes larger = block_of_rows(2 * rows)
    memcpy(row_of(larger, 0), row_of(log.block, 0), 40 * rows)
    log.place = row_of(larger, rows)
    log.end_of_block = row_of(larger, 2 * rows)
    log.block = larger
    return 0


cdef inline int write_row(CallLog log, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e) except -1:
    # Nothing in it calls into Python.
    cdef int64_t* place
    if log.place == log.end_of_block:
        make_room(log)
    place = log.place
    place[0] = a
    place[1] = b
    place[2] = c
    place[3] = d
    place[4] = e
    log.place = place + 5
    return 0


cdef inline int64_t time_of(CallLog log) except? -1:
    if log.clock is None:
        return clock_ns()
    return log.clock()


cdef inline CallLog log_here():
    # As log_of_this_thread, mostly of one log.
    cdef Py_ssize_t number = PyList_GET_SIZE(_running)
    cdef unsigned long thread
    if number == 0:
        return None
    thread = thread_id()
    while number > 0:
        number -= 1
        if (<CallLog>_running[number]).thread == thread:
            return <CallLog>_running[number]
    return None


cdef inline bint is_otherwise(object keyword, PyObject** args, size_t flags, PyObject* names) except -1:
    # Whether that keyword argument is among them and not true.
    cdef Py_ssize_t number = 0 if names is NULL else PyTuple_GET_SIZE(names)
    cdef PyObject** values = args + PyVectorcall_NARGS(flags)
    while number > 0:
        number -= 1
        if PyObject_RichCompareBool(PyTuple_GET_ITEM(names, number), keyword, Py_EQ):
            return not PyObject_IsTrue(values[number])
    return False


cdef inline object timed_call "d5_timed_call"(object function, PyObject** args, size_t flags, PyObject* names):
    cdef TimedCall call = <TimedCall>function
    cdef CallLog log = call.log
    cdef int64_t start_ns, end_ns, code
    if not log.active:
        return call_on(call.__wrapped__, args, flags, names)
    start_ns = time_of(log)
    result = call_on(call.__wrapped__, args, flags, names)
    end_ns = time_of(log)
    code = call.code
    if call.keyword is not None and is_otherwise(call.keyword, args, flags, names):
        code = call.otherwise
    write_row(log, code, label_of(args, flags), start_ns, end_ns, -1)
    return result


cdef inline object noted_items "d5_noted_items"(object function, PyObject** args, size_t flags, PyObject* names):
    cdef NotedItems call = <NotedItems>function
    cdef CallLog log = call.log
    cdef int64_t label
    cdef Py_ssize_t place
    items = call_on(call.__wrapped__, args, flags, names)
    if log.active and PyList_CheckExact(items):
        label = label_of(args, flags)
        for place in range(PyList_GET_SIZE(items)):
            write_row(log, MADE, <int64_t><void*>(<list>items)[place], call.issued, call.waited, label)
    return items


cdef inline object timed_issue "d5_timed_issue"(object function, PyObject** args, size_t flags, PyObject* names):
    cdef TimedIssue call = <TimedIssue>function
    cdef CallLog log
    cdef int64_t start_ns, end_ns
    cdef Py_ssize_t place
    if not PyVectorcall_NARGS(flags) or not PyList_CheckExact(<object>args[0]):
        return call_on(call.__wrapped__, args, flags, names)
    items = <list>args[0]
    if call.idle and not PyList_GET_SIZE(items):
        return []
    log = log_here()
    if log is None:
        return call_on(call.__wrapped__, args, flags, names)
    start_ns = time_of(log)
    handles = call_on(call.__wrapped__, args, flags, names)
    end_ns = time_of(log)
    for place in range(PyList_GET_SIZE(items)):
        write_row(log, SENT, <int64_t><void*>(<list>items)[place], 0, 0, 0)
    write_row(log, ISSUED, <int64_t><void*>handles, 0, start_ns, end_ns)
    return handles


cdef inline object timed_waits "d5_timed_waits"(object function, PyObject** args, size_t flags, PyObject* names):
    cdef TimedWaits call = <TimedWaits>function
    cdef CallLog log
    cdef int64_t start_ns, end_ns
    cdef Py_ssize_t number
    if PyVectorcall_NARGS(flags) != 1 or names is not NULL:
        return call_on(call.__wrapped__, args, flags, names)
    handles = <object>args[0]
    if call.singly and PyList_CheckExact(handles) and not PyList_GET_SIZE(handles):
        return None
    log = log_here()
    if log is None or not handles:
        return call_on(call.__wrapped__, args, flags, names)
    start_ns = time_of(log)
    if not (call.singly and PyList_CheckExact(handles)):
        result = call_on(call.__wrapped__, args, flags, names)
        write_row(log, AWAITED, <int64_t><void*>handles, 1, start_ns, time_of(log))
        return result
    number = PyList_GET_SIZE(handles)
    for handle in <list>handles:
        handle.wait()
        end_ns = time_of(log)
        write_row(log, AWAITED, <int64_t><void*>handles, number, start_ns, end_ns)
        start_ns = end_ns
    return None


cdef inline become(StandIn one):
    # What the interpreter calls, by its kind.
    if type(one) is TimedCall:
        one.vector = vector_of(<void*>timed_call)
    elif type(one) is NotedItems:
        one.vector = vector_of(<void*>noted_items)
    elif type(one) is TimedIssue:
        one.vector = vector_of(<void*>timed_issue)
    elif type(one) is TimedWaits:
        one.vector = vector_of(<void*>timed_waits)


cdef inline set_up_calls():
    cdef StandIn one = StandIn.__new__(StandIn)
    for kind in (StandIn, TimedCall, NotedItems, TimedIssue, TimedWaits):
        call_by_vector(kind, <char*>&one.vector - <char*><void*>one)
