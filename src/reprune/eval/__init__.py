"""What a pruned model is worth: (model, tokens) -> flat names and numbers."""
