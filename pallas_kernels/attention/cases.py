"""Named shapes of block_attention, for tests and benchmarks."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


def chains_mask(num_candidates: int, num_draft_tokens: int) -> bytes:
    """Make the mask of a current token and candidates that see it and themselves."""
    num_rows = 1 + num_candidates * num_draft_tokens
    mask = np.zeros((num_rows, num_rows), np.int8)
    mask[:, 0] = 1
    chains = np.kron(np.eye(num_candidates), np.tri(num_draft_tokens))
    mask[1:, 1:] = chains.astype(np.int8)
    return mask.tobytes()


@dataclass(frozen=True)
class Case:
    """One call; batch rows are cached to slightly different lengths.

    With ``num_candidates`` the block is a tree of as many chains after one current token,
    otherwise it continues the text.
    """

    name: str
    num_rows: int
    capacity: int
    num_cached: int
    batch_size: int = 1
    kv_heads: int = 8
    groups: int = 4
    head_dim: int = 128
    num_candidates: int = 0
    float_dtype: str = "bfloat16"
    is_benchmark: bool = False

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Make the op's arrays; those of the cache repeat after a while, they are large."""
        rng = np.random.default_rng(seed)

        def normal(*shape: int) -> np.ndarray:
            values = rng.standard_normal(min(int(np.prod(shape)), 65521), np.float32)
            return np.resize(values.astype(jnp.dtype(self.float_dtype)), shape)

        batch, rows, heads, width = self.batch_size, self.num_rows, self.kv_heads, self.head_dim
        num_cached = self.num_cached - 3 * np.arange(batch, dtype=np.int32)
        num_cached = np.maximum(num_cached, 0)
        depth = np.arange(rows)
        if self.num_candidates:
            depth[1:] = 1 + (depth[1:] - 1) % ((rows - 1) // self.num_candidates)
        frequency = 1e6 ** (-2 * np.arange(width // 2) / width)
        angle = (num_cached[:, None] + depth[None])[..., None] * frequency
        qkv = normal(batch, rows, heads, self.groups + 2, width)
        cache = (normal(batch, heads, self.capacity, width) for _ in range(2))
        tables = (x.astype(qkv.dtype) for x in (np.cos(angle), np.sin(angle)))
        return qkv, *tables, normal(width), normal(width), *cache, num_cached

    def settings(self) -> dict[str, Any]:
        """Return the op's static arguments."""
        mask = None
        if self.num_candidates:
            num_draft_tokens = (self.num_rows - 1) // self.num_candidates
            mask = chains_mask(self.num_candidates, num_draft_tokens)
        return {"mask": mask, "eps": 1e-6}


CASES = (
    Case("one_row", 1, 150, 70, kv_heads=2, head_dim=64),
    Case("two_lengths_f32", 5, 100, 60, batch_size=2, groups=2, kv_heads=2, float_dtype="float32"),
    Case("three_lengths_f16", 3, 200, 150, 3, 1, groups=5, head_dim=64, float_dtype="float16"),
    Case("chains_f32", 29, 100, 60, kv_heads=2, num_candidates=7, float_dtype="float32"),
    Case("wide_linear", 40, 200, 130, kv_heads=2, groups=2, head_dim=32),
    Case("two_tiles", 6, 200, 150, batch_size=2, kv_heads=2, groups=8),
    Case("chains_narrow", 9, 200, 150, batch_size=2, kv_heads=2, num_candidates=4),
    Case("chains_narrow_f32", 5, 70, 50, kv_heads=2, num_candidates=2, float_dtype="float32"),
    Case("chains_of_150", 151, 200, 40, kv_heads=1, groups=1, head_dim=32, num_candidates=10),
    Case("prefill", 200, 300, 90, batch_size=2, kv_heads=1, groups=2),
    Case("prefill_f32", 130, 150, 20, kv_heads=2, groups=1, head_dim=64, float_dtype="float32"),
    Case("1row_512", 1, 2048, 512, is_benchmark=True),
    Case("1row_8k", 1, 32768, 8192, is_benchmark=True),
    Case("1row_32k", 1, 32768, 32000, is_benchmark=True),
    Case("8rows_512", 8, 2048, 512, is_benchmark=True),
    Case("8rows_512_of_32k", 8, 32768, 512, is_benchmark=True),
    Case("8rows_30k", 8, 32768, 30000, is_benchmark=True),
    Case("16rows_8k", 16, 32768, 8192, is_benchmark=True),
    Case("1row_f32_512", 1, 2048, 512, float_dtype="float32", is_benchmark=True),
    Case("1row_batch8", 1, 2048, 1500, batch_size=8, is_benchmark=True),
    Case("small_model_8rows", 8, 1024, 512, kv_heads=4, groups=2, head_dim=64, is_benchmark=True),
    Case("chains_56rows_512", 56, 2048, 512, num_candidates=11, is_benchmark=True),
    Case("chains_120rows_8k", 120, 32768, 8192, num_candidates=17, is_benchmark=True),
    Case("prefill_512", 512, 2048, 1024, is_benchmark=True),
    Case("prefill_2048", 2048, 32768, 8192, is_benchmark=True),
)
