"""The `zmqdist` command: arguments in, one library call, text out."""
