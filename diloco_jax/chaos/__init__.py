"""Faults: what can go wrong, and seeded plans of when it does."""
