"""`python -m espalier` is `espalier`."""

import os

try:
    import atexit
    import signal
    import sys
except KeyboardInterrupt:
    os._exit(130)


def _end(*_: object) -> None:
    """Ctrl-C before a verb is under way, or after it: no state to save, and imports that must not see an exception."""
    os.write(2, b"espalier: interrupted\n")
    os._exit(130)


_HEARS = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as under `nohup … &`
if _HEARS:
    signal.signal(signal.SIGINT, _end)
    # The first to be registered is the last to run; then Python takes its own handlers away, and the work is done.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    from espalier.cli.main import main as run

    try:
        code = run(begin=_raise)
    except KeyboardInterrupt:
        _end()
    if _HEARS:
        signal.signal(signal.SIGINT, _end)
    sys.exit(code)


def _raise() -> None:
    """From now on Ctrl-C is an exception, which verbs handle."""
    if _HEARS:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main()
