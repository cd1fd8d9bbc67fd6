"""Ground floor: what processes say to each other, and how. Never imports torch or triton."""
