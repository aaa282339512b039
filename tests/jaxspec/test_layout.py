"""BlockLayout: hashable, validated, linear or branching."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec import BlockLayout

BRANCHING = dict(
    depth=[0, 1, 2, 1],
    mask=np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], dtype=bool),
    candidate_rows=[[0, 1, 2]],
    logit_rows=[0, 1, 2],
)


def without(row: int, column: int) -> np.ndarray:
    mask = BRANCHING["mask"].copy()
    mask[row, column] = False
    return mask


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_linear(num_rows):
    layout = BlockLayout.linear(num_rows)
    assert layout.is_linear
    assert layout.depth == tuple(range(num_rows))
    assert layout.candidate_rows == (tuple(range(num_rows)),)
    assert (layout.num_candidates, layout.num_draft_tokens) == (1, num_rows - 1)
    np.testing.assert_array_equal(layout.mask, np.tri(num_rows, dtype=bool))


def test_without_logits_there_is_no_candidate():
    layout = BlockLayout.linear(4, has_logits=False)
    assert layout.is_linear and layout.logit_rows == () and layout.num_candidates == 0


def test_branching_is_hashable_and_not_linear():
    layout = BlockLayout.from_mask(**BRANCHING)
    assert not layout.is_linear
    assert layout == BlockLayout.from_mask(**BRANCHING)
    assert hash(layout) == hash(BlockLayout.from_mask(**BRANCHING))
    assert layout != BlockLayout.linear(4)
    with pytest.raises(ValueError):
        layout.mask[0, 0] = False


def test_candidates_may_share_rows_in_any_order_of_the_block():
    # Rows 1 and 3 follow the current token; 2 and 4 follow 3.
    mask = np.array(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
    )
    layout = BlockLayout.from_mask([0, 1, 2, 1, 2], mask == 1, [[0, 3, 2], [0, 3, 4]], range(5))
    assert (layout.num_candidates, layout.num_draft_tokens) == (2, 2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mask": np.tri(2, dtype=bool)}, "mask has 4 entries, expected 16 for 4 rows"),
        ({"candidate_rows": [[1, 2]]}, "do not start at row 0"),
        ({"candidate_rows": [[0, 1], [0]]}, "differ in length"),
        ({"candidate_rows": [[0, 3]]}, "are not all in logit_rows"),
        ({"logit_rows": [0, 2, 1]}, "are not ascending rows"),
        ({"logit_rows": [0, 1, 2, 9]}, "are not ascending rows"),
        # What would accept drafts that plain decoding would not: another place, another past.
        ({"depth": [0, 1, 1, 1]}, r"rows \(0, 1, 2\): row 2 has depth 1, expected 2"),
        ({"depth": [1, 1, 2, 1]}, r"rows \(0, 1, 2\): row 0 has depth 1, expected 0"),
        ({"candidate_rows": [[0, 2, 1]]}, r"rows \(0, 2, 1\): row 2 has depth 2, expected 1"),
        ({"mask": without(2, 1)}, r"row 2 sees rows \[0, 2\], expected \[0, 1, 2\]"),
        ({"mask": without(1, 1)}, r"row 1 sees rows \[0\], expected \[0, 1\]"),
        ({"mask": np.ones((4, 4), dtype=bool)}, r"row 0 sees rows \[0, 1, 2, 3\], expected \[0\]"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        BlockLayout.from_mask(**(BRANCHING | change))
