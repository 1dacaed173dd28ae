"""One task of a cluster: what the others can ask of it, and how they talk to each other."""
