"""Make `tests` and, uninstalled, `epcross` importable from wherever pytest starts."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
