"""Entry point of the `paceline` command and of `python -m paceline`."""

import signal


def main() -> None:
    # Ctrl-C while the command is imported ends the process instead of printing a traceback.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not ignored, as in a background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from paceline.cli import app

    signal.signal(signal.SIGINT, before)
    app(prog_name="paceline")


if __name__ == "__main__":
    main()
