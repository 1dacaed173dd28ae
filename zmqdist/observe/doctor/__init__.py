"""The checks of `zmqdist doctor`. Each returns findings, which say what is wrong and what to do."""
