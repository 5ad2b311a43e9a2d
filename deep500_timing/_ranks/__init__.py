"""Which process of the job this is, and what the processes tell one another."""
