"""Where tests look for it; the demo moves time as well."""

from devtools.time_travel import advance, install_clock, tick

__all__ = ["advance", "install_clock", "tick"]
