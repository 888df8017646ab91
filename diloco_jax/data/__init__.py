"""Text as bytes, and batches of it with a position that can be saved."""
