"""`python -m jaxlookahead`."""

import sys

from jaxlookahead.cli.main import main

sys.exit(main())
