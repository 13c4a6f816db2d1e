"""``python -m flashsdk``."""

from __future__ import annotations

import sys

from flashsdk.cli import main

if __name__ == "__main__":
    sys.exit(main())
