"""`brigade top`: a live screen of a running engine, over its client socket."""
