"""`python -m mpcompile`: the command line."""

from .cli import main

raise SystemExit(main())
