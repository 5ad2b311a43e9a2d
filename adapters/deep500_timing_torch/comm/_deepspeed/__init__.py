"""What DeepSpeed's ``comm`` has beside PyTorch's operations, with its names and its ways of calling."""
