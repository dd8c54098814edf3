"""`python -m models`."""

import sys

from models.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
