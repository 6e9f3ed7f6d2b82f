"""Runs the command line as `python -m phalanx`, and under `torchrun -m phalanx`."""

import sys

from phalanx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
