"""The operators, a module for each family. dataset.py imports all but those in `ELSEWHERE` of interfaces.py."""
