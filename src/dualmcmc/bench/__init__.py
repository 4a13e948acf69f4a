"""Measurements that a user can repeat on a machine of their own."""
