"""Virtual time: the protocol's machines without processes or accelerators."""
