"""Mistakes in what the user asked for, told apart from failures of the program."""

from __future__ import annotations


class InputError(Exception):
    """An option, file or folder that the run cannot start with.

    The message is one line: what was wrong, what was found and what to do; several mistakes of a
    command line are a line each. `hp-train` prints it once and ends with exit status 2 before any
    training.
    """
