"""`python -m misa`: see `misa --help`."""

import sys

from ._cli import main

sys.exit(main())
