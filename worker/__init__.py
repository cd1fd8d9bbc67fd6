"""One stage of the pipeline: its weights, its cache, and the loop that computes. May import ipc and kernels."""
