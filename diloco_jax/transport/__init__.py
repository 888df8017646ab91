"""How messages and payloads travel: in one process, or by gRPC."""
