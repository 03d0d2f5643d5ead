"""`python -m meshkit`."""

import sys

from meshkit.cli import main

sys.exit(main())
