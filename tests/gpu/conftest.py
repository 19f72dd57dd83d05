"""Before CUDA starts: local worlds of many ranks need a hardware queue for each stream (``testing.local_world``)."""

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
