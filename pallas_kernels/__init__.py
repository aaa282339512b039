"""Kernels of speculative decoding, each with a Pallas and an XLA form.

Results that are ids, counts or copies are equal in both forms; products and attention agree within
the rounding of their dtype.

Axis letters: B batch rows, P text capacity in tokens, M draft tokens, R rows of logits,
V vocabulary, Q partial results of a row, T tokens of a block, C candidates. Of caches: K heads,
S slots, H head width, W rows to write. Of attention: G query heads of a kv head, X = G + 2 heads
of a fused projection, H2 half of H. Of products: R rows, D or K inner width, N or F columns. Of
pools: R entries, N tokens of an n-gram, n new ones, G n-grams found.

Every op takes ``implementation``: "triton" (compiled Pallas kernel), "interpret" (the same
kernel body, interpreted), "xla" (plain jnp), or None: by platform, see ``dispatch``.
"""

from pallas_kernels.argmax import argmax as argmax
from pallas_kernels.argmax import argmax_partial as argmax_partial
from pallas_kernels.argmax import argmax_reduce as argmax_reduce
from pallas_kernels.attention import block_attention as block_attention
from pallas_kernels.find_ngram import find_ngram as find_ngram
from pallas_kernels.linear import PreNorm as PreNorm
from pallas_kernels.linear import linear_residual as linear_residual
from pallas_kernels.linear import pre_norm as pre_norm
from pallas_kernels.linear import rms_linear as rms_linear
from pallas_kernels.linear import rms_swiglu as rms_swiglu
from pallas_kernels.ngram_pool import insert_ngrams as insert_ngrams
from pallas_kernels.ngram_pool import lookup_ngrams as lookup_ngrams
from pallas_kernels.top_threshold import top_threshold as top_threshold
from pallas_kernels.verify_greedy import verify_greedy as verify_greedy
from pallas_kernels.write_rows import write_rows as write_rows

__all__ = [
    "PreNorm",
    "argmax",
    "argmax_partial",
    "argmax_reduce",
    "block_attention",
    "find_ngram",
    "insert_ngrams",
    "linear_residual",
    "lookup_ngrams",
    "pre_norm",
    "rms_linear",
    "rms_swiglu",
    "top_threshold",
    "verify_greedy",
    "write_rows",
]
