"""`python -m zmqdist_cli` is `zmqdist`."""

import sys

from zmqdist_cli.main import main

sys.exit(main())
