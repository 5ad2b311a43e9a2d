# Reads frames in the process's own memory, in C; see stack.py. Plain Python never sees this file.
#
# Where things lie in memory is known from CPython's own headers, which differ from version to version.
cdef extern from *:
    """
    #if defined(__linux__) && CYTHON_COMPILING_IN_CPYTHON && !defined(Py_GIL_DISABLED) && PY_VERSION_HEX < 0x030E0000
    #ifndef Py_BUILD_CORE
      #define Py_BUILD_CORE 1
    #endif
    #include "internal/pycore_frame.h"
    #include <fcntl.h>
    #include <linux/futex.h>
    #include <stdlib.h>
    #include <sys/syscall.h>
    #include <sys/uio.h>
    #include <time.h>
    #include <unistd.h>

    #define D5_DEEPEST 200
    #define D5_SAMPLES 64
    #define D5_TRIES 3
    #define D5_SEEN 4096
    #define D5_LONGEST (1 << 20)
    #define D5_WINDOW 4096
    #if PY_VERSION_HEX < 0x030D0000
      #define D5_CODE f_code
      #define D5_AT prev_instr
    #else
      #define D5_CODE f_executable
      #define D5_AT instr_ptr
    #endif
    #if PY_VERSION_HEX < 0x030C0000
      #define D5_IS_OF_C(frame) 0
    #else
      #define D5_IS_OF_C(frame) ((frame).owner == FRAME_OWNED_BY_CSTACK)
    #endif
    #define D5_HEAD offsetof(_PyInterpreterFrame, localsplus)

    /* 8 bytes each: stack.py reads the samples as a row of integers. */
    typedef struct { char *code; int64_t at, tag; } d5_frame;
    typedef struct { int64_t now, ran, waited, depth; d5_frame frames[D5_DEEPEST]; } d5_sample;
    typedef struct {
        d5_sample samples[D5_SAMPLES];
        PyThreadState *thread;
        int64_t next;
        double phase;
        uint32_t woken;
        int64_t seen[D5_SEEN];
    } d5_room;
    #define D5_IN(block) ((d5_room *)PyBytes_AS_STRING(block))

    static int d5_read(void *to, const void *from, size_t length) {
        struct iovec here = {to, length}, there = {(void *)from, length};
        return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == (ssize_t)length;
    }

    static int d5_innermost(PyThreadState *thread, _PyInterpreterFrame **place) {
      #if PY_VERSION_HEX < 0x030D0000
        _PyCFrame *inner;
        return d5_read(&inner, &thread->cframe, sizeof inner)
            && d5_read(place, &inner->current_frame, sizeof *place);
      #else
        return d5_read(place, &thread->current_frame, sizeof *place);
      #endif
    }

    #define D5_CODE_HEAD offsetof(PyCodeObject, co_code_adaptive)

    /* Tells a code object from one that takes its place later. */
    static int64_t d5_tag(PyCodeObject *place, PyCodeObject *code) {
        uint64_t tag = (uint64_t)(uintptr_t)place;
        tag = tag * 0x9E3779B97F4A7C15u + (uint64_t)(uintptr_t)code->co_filename;
        tag = tag * 0x9E3779B97F4A7C15u + (uint64_t)(uintptr_t)code->co_qualname;
        tag = tag * 0x9E3779B97F4A7C15u + (uint64_t)(uintptr_t)code->co_linetable;
        tag = tag * 0x9E3779B97F4A7C15u + (uint64_t)code->co_firstlineno;
        return (int64_t)((tag ^ tag >> 32) >> 1);
    }

    /* Bytes that were read at once: the frames of calls lie one after the other, the caller's before. */
    typedef struct { uintptr_t from; char bytes[D5_WINDOW]; } d5_window;

    /* `place` may be any number: what is added to it wraps around. */
    static int d5_frame_at(_PyInterpreterFrame *to, uintptr_t place, d5_window *window) {
        if (!window->from || place - window->from > D5_WINDOW - D5_HEAD) {
            window->from = place - (D5_WINDOW - D5_HEAD);
            if (!d5_read(window->bytes, (void *)window->from, D5_WINDOW)) {
                window->from = 0;
                return d5_read(to, (void *)place, D5_HEAD);
            }
        }
        memcpy(to, window->bytes + (place - window->from), D5_HEAD);
        return 1;
    }

    /* The number of a thread's frames, the innermost first; -1 if they make no sense. The thread may run meanwhile.
       Only frames are told, from the outermost on, that are the same after all were read: those inside have returned. */
    static int d5_frames(PyThreadState *thread, d5_frame *frames) {
        _PyInterpreterFrame *places[D5_DEEPEST], *place, first[D5_DEEPEST], again[D5_DEEPEST];
        PyCodeObject codes[D5_DEEPEST];
        struct iovec here[D5_DEEPEST], there[D5_DEEPEST];
        d5_window window = {0};
        int depth = 0, at, parts = 0, begin;
        if (!d5_innermost(thread, &place)) return -1;
        while (place && depth < D5_DEEPEST) {
            if (!d5_frame_at(&first[depth], (uintptr_t)place, &window)) return -1;
            places[depth] = place;
            place = first[depth].previous;
            depth += !D5_IS_OF_C(first[depth]);
        }
        for (at = depth - 1; at >= 0; at--, parts++) {
            ((PyObject *)&codes[at])->ob_type = NULL;
            here[parts] = (struct iovec){&codes[at], D5_CODE_HEAD};
            there[parts] = (struct iovec){first[at].D5_CODE, D5_CODE_HEAD};
        }
        /* It reads until something is not there. */
        if (parts && process_vm_readv(getpid(), here, parts, there, parts, 0) < 0) return -1;
        window.from = 0;
        for (at = 0; at < depth; at++)
            if (!d5_frame_at(&again[at], (uintptr_t)places[at], &window)) again[at].D5_CODE = NULL;
        if (!d5_innermost(thread, &place)) return -1;
        for (begin = depth; begin > 0; begin--) {
            at = begin - 1;
            char *code = (char *)first[at].D5_CODE;
            int64_t offset = (char *)first[at].D5_AT - code - (int64_t)D5_CODE_HEAD;
            if (((PyObject *)&codes[at])->ob_type != &PyCode_Type || again[at].D5_CODE != first[at].D5_CODE
                || again[at].previous != first[at].previous
                || offset >= ((PyVarObject *)&codes[at])->ob_size * (int64_t)sizeof(_Py_CODEUNIT)) break;
            /* Below 0 it has just begun. */
            frames[at] = (d5_frame){code, offset < 0 ? 0 : offset, d5_tag((PyCodeObject *)code, &codes[at])};
            if (places[at] == place) { begin--; break; }
        }
        if (depth && begin == depth) return -1;
        memmove(frames, frames + begin, (depth - begin) * sizeof *frames);
        return depth - begin;
    }

    static int64_t d5_now(void) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    }

    /* Of the main thread. */
    static void d5_times(int64_t *ran, int64_t *waited) {
        char text[96], *end = text;
        int file = open("/proc/self/schedstat", O_RDONLY | O_CLOEXEC);
        ssize_t length = file < 0 ? -1 : read(file, text, sizeof(text) - 1);
        if (file >= 0) close(file);
        *ran = *waited = -1;
        if (length <= 0) return;
        text[length] = 0;
        *ran = strtoll(text, &end, 10);
        *waited = strtoll(end, &end, 10);
    }

    /* Wait, and sample meanwhile; returns the number of samples. */
    static int d5_watch(d5_room *room, int64_t wait, int64_t period) {
        int count = 0, tries, at, fresh = 0;
        int64_t now = d5_now(), until = now + wait, left;
        struct timespec nap;
        if (room->next < now) room->next = now + period / 2;
        while (count < D5_SAMPLES && !fresh && !__atomic_load_n(&room->woken, __ATOMIC_ACQUIRE)) {
            left = (room->next < until ? room->next : until) - d5_now();
            if (left > 0) {
                nap.tv_sec = left / 1000000000;
                nap.tv_nsec = left % 1000000000;
                syscall(SYS_futex, &room->woken, FUTEX_WAIT_PRIVATE, 0, &nap, NULL, 0);
                continue;
            }
            if (room->next >= until) break;
            d5_sample *sample = &room->samples[count++];
            sample->now = d5_now();
            for (tries = 0; tries < D5_TRIES && (sample->depth = d5_frames(room->thread, sample->frames)) < 0; tries++) {}
            d5_times(&sample->ran, &sample->waited);
            /* A code object that was not seen before may go soon, as that of a module: it is to be looked at now. */
            for (at = 0; at < sample->depth; at++) {
                int64_t tag = sample->frames[at].tag, *seen = &room->seen[tag % D5_SEEN];
                fresh |= *seen != tag;
                *seen = tag;
            }
            /* Uneven, so that no period of the program hides from the samples. */
            room->phase += 0.6180339887;
            if (room->phase >= 1) room->phase -= 1;
            room->next += (int64_t)(period * (0.5 + room->phase));
            if (room->next < d5_now()) room->next = d5_now() + (int64_t)(period * (0.5 + room->phase));
        }
        return count;
    }

    /* Room for the samples of a thread; the calling one for 0. */
    static PyObject *d5_room_for(unsigned long ident) {
        PyThreadState *thread = PyThreadState_Get(), *next = PyInterpreterState_ThreadHead(thread->interp);
        unsigned long of;
        while (ident && next) {
            thread = next;
            if (!d5_read(&of, &thread->thread_id, sizeof of) || !d5_read(&next, &thread->next, sizeof next)) break;
            if (of == ident) ident = 0;
        }
        if (ident) Py_RETURN_NONE;
        PyObject *block = PyBytes_FromStringAndSize(NULL, sizeof(d5_room));
        if (block) {
            memset(D5_IN(block), 0, sizeof(d5_room));
            D5_IN(block)->thread = thread;
        }
        return block;
    }

    static int d5_watch_in(PyObject *block, long long wait, long long period) {
        int count;
        Py_BEGIN_ALLOW_THREADS
        count = d5_watch(D5_IN(block), wait, period);
        Py_END_ALLOW_THREADS
        return count;
    }

    static void d5_read_now(PyObject *block) {
        D5_IN(block)->samples[0].depth = d5_frames(D5_IN(block)->thread, D5_IN(block)->samples[0].frames);
    }

    static void d5_wake(PyObject *block) {
        __atomic_store_n(&D5_IN(block)->woken, 1, __ATOMIC_RELEASE);
        syscall(SYS_futex, &D5_IN(block)->woken, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }

    /* Copies of what an object holds that may be gone: a text, or bytes. NULL, without an error, if it is none. */
    static PyObject *d5_copy(PyObject *from) {
        PyCompactUnicodeObject text;
        PyBytesObject bytes;
        PyObject *found = NULL, *type;
        if (!d5_read(&type, &from->ob_type, sizeof type)) return NULL;
        if (type == (PyObject *)&PyBytes_Type) {
            if (!d5_read(&bytes, from, sizeof bytes) || bytes.ob_base.ob_size < 0 || bytes.ob_base.ob_size > D5_LONGEST)
                return NULL;
            found = PyBytes_FromStringAndSize(NULL, bytes.ob_base.ob_size);
            if (found && !d5_read(PyBytes_AS_STRING(found), ((PyBytesObject *)from)->ob_sval, bytes.ob_base.ob_size))
                Py_CLEAR(found);
        } else if (type == (PyObject *)&PyUnicode_Type && d5_read(&text, from, sizeof text)) {
            Py_ssize_t kind = text._base.state.kind, length = text._base.length;
            if (!text._base.state.compact || (kind != 1 && kind != 2 && kind != 4) || length < 0 || length > D5_LONGEST)
                return NULL;
            char *data = (char *)from + (text._base.state.ascii ? sizeof(PyASCIIObject) : sizeof text);
            char *copy = (char *)PyMem_Malloc(kind * length + 1);
            if (copy && d5_read(copy, data, kind * length)) found = PyUnicode_FromKindAndData(kind, copy, length);
            PyMem_Free(copy);
        }
        if (PyErr_Occurred()) PyErr_Clear();
        return found;
    }

    /* What a code object holds: file, name, lines, first line, size in bytes. None if it has gone. Needs the GIL, and
       trusts nothing. */
    static PyObject *d5_code(Py_ssize_t place, long long tag) {
        PyCodeObject code;
        if (!d5_read(&code, (void *)place, D5_CODE_HEAD) || ((PyObject *)&code)->ob_type != &PyCode_Type
            || d5_tag((PyCodeObject *)place, &code) != tag) Py_RETURN_NONE;
        Py_ssize_t size = ((PyVarObject *)&code)->ob_size * (Py_ssize_t)sizeof(_Py_CODEUNIT);
        PyObject *file = d5_copy(code.co_filename), *name = d5_copy(code.co_qualname), *lines = d5_copy(code.co_linetable);
        /* Of a code object that is gone another object may be in their place. */
        if (file && name && lines && PyUnicode_Check(file) && PyUnicode_Check(name) && PyBytes_Check(lines)
            && size > 0 && size < D5_LONGEST)
            return Py_BuildValue("(NNNin)", file, name, lines, code.co_firstlineno, size);
        Py_XDECREF(file); Py_XDECREF(name); Py_XDECREF(lines);
        Py_RETURN_NONE;
    }
    #else
    static PyObject *d5_room_for(unsigned long ident) { Py_RETURN_NONE; }
    static int d5_watch_in(PyObject *block, long long wait, long long period) { return 0; }
    static void d5_read_now(PyObject *block) {}
    static void d5_wake(PyObject *block) {}
    static PyObject *d5_code(Py_ssize_t place, long long tag) { Py_RETURN_NONE; }
    #endif
    """
    object room_for "d5_room_for"(unsigned long ident)
    int watch_in "d5_watch_in"(object room, long long wait_ns, long long period_ns) noexcept
    void read_now "d5_read_now"(object room) noexcept
    void wake_in "d5_wake"(object room) noexcept
    object code_at "d5_code"(Py_ssize_t place, long long tag)
