from symmcomm.kernels.cache import find_room

find_room()
