"""Plain data: distributions, statistics, snapshots, trees, and the text of times and sizes."""
