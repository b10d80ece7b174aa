"""How sparsity is spread over blocks, and the patterns that survivors form."""
