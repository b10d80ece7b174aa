"""Prune language models block by block, reconstruct what pruning broke, and measure what the error is worth."""

__version__ = "0.1.0"
