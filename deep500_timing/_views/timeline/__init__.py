"""A run as a timeline: who was in which region when, for Perfetto's viewer or for any that reads Chrome's format.

``write`` is the entry; ``_from_run`` and ``_kineto`` say what happened, ``_perfetto`` and ``_chrome`` write it down.
"""
