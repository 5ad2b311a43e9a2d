"""What a person reads, made from plain data."""
