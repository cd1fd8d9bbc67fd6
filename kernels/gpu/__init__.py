"""Triton kernels: for each operation of ``kernels`` a function that describes its launch, and one that runs it.

Nothing but ``dispatch`` is imported before tensors lie on a GPU: triton is slow to load, and not everywhere.
"""
