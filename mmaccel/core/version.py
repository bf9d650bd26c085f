"""The version of mmaccel."""

__version__ = "0.1.0"
