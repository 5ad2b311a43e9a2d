"""The compiled kernel at PyTorch's dispatcher: how it is built, and how what it saw comes into the log."""
