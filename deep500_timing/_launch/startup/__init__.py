"""The folder that child processes of ``deep500-timing run`` find on ``PYTHONPATH``."""
