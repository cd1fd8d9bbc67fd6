"""Steps that come often, captured once and replayed: which, when, and with what padding. See docs/graphs.md."""
