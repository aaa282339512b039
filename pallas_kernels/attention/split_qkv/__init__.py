"""The part of ``block_attention`` that takes projections of more than 16 rows, which it splits."""
