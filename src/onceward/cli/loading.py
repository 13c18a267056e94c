"""Finding what the command line names in somebody's code."""

from onceward.loading import loaded

__all__ = ["loaded"]
