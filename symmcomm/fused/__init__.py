"""Operators with a collective inside. Each is a function of a communicator and tensors."""
