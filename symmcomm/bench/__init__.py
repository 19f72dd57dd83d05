"""The benchmark behind ``symmcomm bench``: cases, oracle, implementations, teams of ranks, timing, reports."""
