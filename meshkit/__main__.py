"""Run `python -m meshkit` after removing the working directory from `sys.path`, where Python puts it first."""

import contextlib
import os
import sys

_ours = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
with contextlib.suppress(OSError):  # a working directory that was removed
    if not sys.flags.safe_path and os.path.realpath(sys.path[0]) == os.path.realpath(os.getcwd()) != _ours:
        del sys.path[0]  # meshkit.config.user_code needs no entry to find a user's code

from meshkit.cli import main  # noqa: E402

sys.exit(main())
