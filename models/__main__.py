"""The command line: `python -m models generate "prompt" ["prompt 2" ...]`."""

import sys

from models.cli import main

sys.exit(main())
