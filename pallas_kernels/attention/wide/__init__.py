"""The part of ``block_attention`` that takes other blocks of more than 16 rows."""
