"""A report on a run: one self-contained HTML page."""
