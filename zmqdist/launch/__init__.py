"""Starts one role in the foreground, a cluster for a with-statement, or all jobs of a cluster
file.
"""
