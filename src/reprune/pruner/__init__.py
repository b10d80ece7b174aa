"""Pruners: (weight, statistic, sparsity, pattern) -> (weight, keep); one file and one YAML a method."""
