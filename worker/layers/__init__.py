"""Building blocks that models are composed from.

Letters for sizes, used in shapes everywhere:

    T  tokens in the step        S  sequences in the step
    H  query heads               G  key/value heads             D  head size
    C  model width               V  vocabulary                  I  width inside the MLP
    B  blocks of the KV cache    K  tokens per block            L  tokens in a sequence's cache
"""
