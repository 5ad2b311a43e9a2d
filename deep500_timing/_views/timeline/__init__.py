"""A run as a timeline: who was in which region when, for Perfetto's viewer or for any that reads Chrome's format."""
