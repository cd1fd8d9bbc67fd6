"""The OpenAI-compatible HTTP server: a client of the core like any other. Needs the extra ``brigade[http]``."""
