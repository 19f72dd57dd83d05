"""Before CUDA starts: local worlds of many ranks need a hardware queue for each stream (``testing.local_world``)."""

from symmcomm.env import ask_for_hardware_queues

ask_for_hardware_queues()
