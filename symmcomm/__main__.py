"""``python -m symmcomm`` is the ``symmcomm`` command."""

from symmcomm.cli import main

if __name__ == "__main__":
    main()
