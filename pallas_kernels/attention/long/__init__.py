"""The part of ``block_attention`` that takes long blocks."""
