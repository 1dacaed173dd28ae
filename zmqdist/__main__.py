"""`python -m zmqdist` runs the command `zmqdist`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("zmqdist_cli", run_name="__main__", alter_sys=True)
