"""The version of this package: what the wheel is called, and what the ranks of a group compare."""

VERSION = "0.2.0"
