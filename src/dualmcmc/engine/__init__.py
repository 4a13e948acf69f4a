"""Makes iterations durable: the loop, checkpoints, the guard, the moving average, the log."""
