"""`llmctl`, which is also `python -m toolkit`.

It imports little, so that Ctrl-C is in order also while the command line is imported.
"""

import sys

from toolkit import interrupts


def main() -> None:
    """Run `llmctl`; never returns."""
    interrupts.catch()
    try:
        _run()
    except SystemExit as ended:
        interrupts.leave(ended.code)
        raise


def _run() -> None:
    try:
        from toolkit.cli.main import run

        run()
    except BaseException as error:  # also what a half imported library made of Ctrl-C
        in_order = isinstance(error, SystemExit) and not error.code
        if in_order and interrupts.noted():  # a server that has drained
            sys.exit(interrupts.EXIT_CODE)
        if isinstance(error, SystemExit) or not interrupts.caused(error):
            raise
        interrupts.tell()
        sys.exit(interrupts.EXIT_CODE)
    finally:
        interrupts.done()


if __name__ == "__main__":
    main()
