# C types of timer.py; Cython reads both. Plain Python never sees this file.
from deep500_timing._recording.intervals cimport Intervals
from deep500_timing._recording.recorder cimport Lane, Recorder, Region, clock_ns, look_up, thread_id


cdef class Timer(Recorder):
    pass


cdef class CPUGPUTimer(Timer):
    cdef public object _device

    cpdef _forget_open(self, Region region)
