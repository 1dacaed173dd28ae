"""Training with parameter servers. Users import from `zmqdist.parameter_server` and
`zmqdist.checkpoint`."""
