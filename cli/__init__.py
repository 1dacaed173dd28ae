"""The `zmqdist` command: each subcommand reads its arguments, makes one call of the library, and
prints text."""
