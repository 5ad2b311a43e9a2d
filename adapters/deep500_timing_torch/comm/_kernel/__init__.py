"""The compiled kernel in PyTorch's dispatcher: how it is built, loaded and called."""
