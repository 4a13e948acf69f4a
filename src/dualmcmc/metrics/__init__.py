"""Numbers that say how good samples are: arrays in, one number out."""
