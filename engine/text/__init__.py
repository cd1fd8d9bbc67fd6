"""Text to token ids and back; nothing here knows of sockets or of the engine's state."""
