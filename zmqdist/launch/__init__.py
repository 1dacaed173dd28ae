"""Starting things: one role in the foreground, a cluster for a with-statement, a whole cluster file."""
