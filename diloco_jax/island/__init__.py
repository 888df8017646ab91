"""One island: inner training on its mesh, and the exchange with the syncer."""
