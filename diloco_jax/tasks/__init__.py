"""What is trained: initial values, loss, data."""
