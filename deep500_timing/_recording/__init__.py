"""The hot path: open regions, finished intervals, and what times a function or an iteration."""
