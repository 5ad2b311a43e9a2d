"""What timing costs, measured next to the alternatives: ``python -m benchmarks``, or ``make bench``."""
