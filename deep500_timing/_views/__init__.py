"""Tables, findings, pages and timelines, made from plain data."""
