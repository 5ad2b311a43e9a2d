"""Times on a device: the pool of events, and what a device clock must do."""
