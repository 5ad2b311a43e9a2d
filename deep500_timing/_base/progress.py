"""How far a long piece of work is."""

show = lambda done, of: None  # noqa: E731 (a command puts its own here)
"""Called with how much is done and how much is to be done, in any unit, by who does it."""
