"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The project's directory."""
