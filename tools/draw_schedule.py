"""Draw a pipeline schedule: see `python tools/draw_schedule.py --help`."""

import sys

from megalite.cli.schedule import main

if __name__ == "__main__":
    sys.exit(main())
