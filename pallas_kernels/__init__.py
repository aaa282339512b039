"""Kernels of speculative decoding, each with a Pallas and an XLA form that give equal results.

Axis letters: B batch rows, P text capacity in tokens, M draft tokens, R rows of logits,
V vocabulary, Q partial results of a row, T tokens of a block, C candidates.

Every op takes ``implementation``: "triton" (compiled Pallas kernel), "interpret" (the same
kernel body, interpreted), "xla" (plain jnp), or None: by platform, see ``dispatch``.
"""

from pallas_kernels.argmax import argmax as argmax
from pallas_kernels.argmax import argmax_partial as argmax_partial
from pallas_kernels.argmax import argmax_reduce as argmax_reduce
from pallas_kernels.find_ngram import find_ngram as find_ngram
from pallas_kernels.verify_greedy import verify_greedy as verify_greedy

__all__ = ["argmax", "argmax_partial", "argmax_reduce", "find_ngram", "verify_greedy"]
