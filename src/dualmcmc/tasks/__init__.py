"""From a trained run to pictures and numbers."""
