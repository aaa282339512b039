"""The part of ``block_attention`` for more than 128 rows that continue the text."""
