"""Where a model comes from: one file and one YAML a kind."""
