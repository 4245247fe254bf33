"""`python -m toolkit` is `llmctl`."""

from toolkit.cli.main import run

run()
