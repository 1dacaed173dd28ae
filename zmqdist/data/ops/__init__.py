"""The operators, one module per family. dataset.py imports all of them except those in `interfaces.OPERATOR_MODULES`."""
