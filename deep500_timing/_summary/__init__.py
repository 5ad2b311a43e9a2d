"""Plain data about what was recorded: statistics, snapshots, and times and sizes as text."""
