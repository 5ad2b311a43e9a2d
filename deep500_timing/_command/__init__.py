"""The command ``deep500-timing``.

A subcommand is a row in :data:`deep500_timing._command._app.COMMANDS` and a function of its name in a module.
"""
