"""Training: the loop, how networks run, states and checkpoints, the divergence guard, the log, several processes."""
