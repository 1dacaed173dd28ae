"""What the tasks of a cluster agree on: barriers, a key-value store, who is there and who has failed."""
