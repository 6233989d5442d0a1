"""`python -m minifer`: the command line where its script is not on the path."""

import sys

from minifer.cli import main

sys.exit(main())
