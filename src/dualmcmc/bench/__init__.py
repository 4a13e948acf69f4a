"""`dualmcmc bench`: the speed of an iteration compared with a plain eager reference."""
