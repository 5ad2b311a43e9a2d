"""``deep500-timing run`` and ``deep500_timing.autolog()``: time a program that was not edited.

``command`` reads the command line, ``program`` runs a script as Python itself would, ``startup`` is the folder that a
child process finds on ``PYTHONPATH``, ``autolog`` holds the timer, the plug-ins and the report at the end. No module
here imports a framework.
"""
