"""`python -m octavo.cli`: the command `octavo` where no script is installed, as under torchrun."""

import sys

from octavo.cli import main

sys.exit(main())
