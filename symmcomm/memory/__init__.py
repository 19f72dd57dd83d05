"""Symmetric memory: allocation, providers, and descriptors between processes."""
