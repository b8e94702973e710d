"""The one exception that a user's mistake raises."""

from __future__ import annotations


class DraftsmithError(Exception):
    """A mistake or a circumstance that the user can mend.

    The message names the value, the place and the way out; the command line prints it as one line without a traceback.
    """
