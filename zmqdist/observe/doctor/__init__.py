"""The checks of `zmqdist doctor`. Each check returns findings, which say what is wrong and what to
do."""
