# C types of timer.py; Cython reads both. Plain Python never sees this file.
cimport cython
from libc.stdint cimport int64_t

from deep500_timing._recording.intervals cimport Intervals
from deep500_timing._recording.recorder cimport (
    Recorder, Region, ThreadRegions, add_fast_paths, cache_methods, clock_ns, look_up, thread_id
)
from deep500_timing.devices._device cimport Device, EventPair


cdef extern from *:
    """
    /* The method behind a descriptor, as a method of a subclass. */
    static inline PyObject *d5_method_of(PyObject *kind, PyObject *descriptor) {
        return PyDescr_NewMethod((PyTypeObject *)kind, ((PyMethodDescrObject *)descriptor)->d_method);
    }
    """
    object method_of "d5_method_of"(object kind, object descriptor)


cdef class Timer(Recorder):
    cdef public Device _device
    cdef public object _device_clock

    @cython.locals(pair=EventPair, start_ns=int64_t)
    cpdef _start_on_device(self, Region region)
    @cython.locals(start_ns=int64_t, pair=EventPair, intervals=Intervals, store=Intervals)
    cdef _end_on_device(self, Region region, object gpu, int64_t now_ns)
    cpdef _take_back(self, Region region, object pair)


@cython.final
cdef class DeviceRegion:
    cdef Timer _timer
    cdef object _key
