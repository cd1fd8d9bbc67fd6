"""Makes what docs/ shows."""
