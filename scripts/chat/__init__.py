"""`brigade chat`: a conversation with the model in a terminal."""
