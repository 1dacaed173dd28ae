"""The operators, with one module for each family. dataset.py imports all modules except those in
`interfaces.OPERATOR_MODULES`."""
