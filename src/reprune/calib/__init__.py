"""Corpora to draw calibration and held-out sequences from: one file and one YAML a corpus."""
