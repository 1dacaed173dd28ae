"""Bridges to libraries that users have beside this one; each module needs its library, which is an extra."""
