"""A report of every rank: what each sends, how it travels, what is made of all of them, and who is late."""
