"""The dashboard: a read-only page in the browser that shows the facts of a cluster."""
