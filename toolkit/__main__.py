"""`llmctl`, which is also `python -m toolkit`.

It imports little, so that Ctrl-C is in order also while the command line is imported.
"""

import sys

from toolkit import interrupts


def main() -> None:
    """Run `llmctl`; never returns."""
    interrupts.catch()
    try:
        from toolkit.cli.main import run

        run()
    except BaseException as error:  # also what a half imported library made of Ctrl-C
        code = interrupts.exit_code(error)
        if code is None:
            raise
        sys.exit(code)
    finally:
        interrupts.over()


if __name__ == "__main__":
    main()
