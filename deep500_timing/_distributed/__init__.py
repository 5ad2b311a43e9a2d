"""Several ranks: discovery, messages between them, clocks of several hosts, one report of all, stragglers."""
