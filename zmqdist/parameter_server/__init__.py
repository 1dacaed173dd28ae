"""Clusters with parameter servers."""
