"""A run as a timeline: which rank and thread was in which region when."""
