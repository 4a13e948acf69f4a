"""The entry point of the command: `dualmcmc`, `python -m dualmcmc`."""

import sys


def run() -> None:
    """Import and run the command; Ctrl-C during the import leaves no traceback."""
    try:
        from dualmcmc.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
