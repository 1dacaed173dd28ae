"""Training with parameter servers; `zmqdist.parameter_server` and `zmqdist.checkpoint` have what users call."""
