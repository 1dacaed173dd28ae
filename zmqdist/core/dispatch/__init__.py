"""The dispatcher's decisions: `broker.Broker` is membership and dispatch together; no I/O."""
