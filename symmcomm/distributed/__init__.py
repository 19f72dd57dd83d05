"""How users of torch meet symmcomm: the backend ``symm``, ``torch.ops.symmcomm``, symmetric memory.

Nothing is imported here: ``import symmcomm`` only registers the backend's name (``registration``).
"""
