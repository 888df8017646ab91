"""What is kept on disk: parameters and checkpoints, by Orbax."""
