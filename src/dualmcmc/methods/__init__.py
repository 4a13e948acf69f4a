"""One file a learning rule."""
