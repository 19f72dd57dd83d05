"""Tools of the tests: ranks as processes, oracles, fault injection."""
