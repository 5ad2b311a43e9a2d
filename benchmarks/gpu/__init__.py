"""One session on a GPU: what only a GPU can show, measured and written down; see ``__main__.py``."""
