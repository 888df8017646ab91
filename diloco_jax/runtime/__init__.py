"""The loop that joins a machine of `protocol/` to a driver in real time."""
