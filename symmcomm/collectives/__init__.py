"""The collectives, one a file: validate, choose, launch. They are the methods of ``Communicator``."""
