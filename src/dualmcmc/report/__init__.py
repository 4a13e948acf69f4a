"""One self-contained HTML page a run."""
