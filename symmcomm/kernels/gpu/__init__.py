"""CuTe DSL kernels, one family a file. Importing a kernel file imports CuTe DSL; importing this package does not."""
