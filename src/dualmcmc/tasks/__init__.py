"""From a trained run to pictures and numbers."""

from dualmcmc.tasks.inputs import images_for

__all__ = ["images_for"]
