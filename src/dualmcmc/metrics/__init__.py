"""Metrics of images and samples: tensors in, numbers out."""
