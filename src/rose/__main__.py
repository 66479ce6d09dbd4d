"""`python -m rose` is the `rose` command."""

import sys

from rose.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
