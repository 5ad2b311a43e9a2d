"""What timing costs, measured beside the alternatives: ``python -m benchmarks``, or ``make bench``."""
