"""The command ``deep500-timing``: one module for each subcommand, imported when it is asked for.

A subcommand is a row in :data:`deep500_timing._command._table.COMMANDS` and a module with a ``command``.
"""
