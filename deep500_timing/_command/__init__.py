"""The command ``deep500-timing``: a subcommand is a function of its name, and a row in ``_app.COMMANDS``."""
