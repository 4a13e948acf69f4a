"""`dualmcmc paper`: the paper's tables and figures, measured again beside its numbers."""
