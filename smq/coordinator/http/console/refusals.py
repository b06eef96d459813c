"""Why a request of a browser gets no page: what is wrong with it, or what is not there.

Owns these exceptions and nothing else. All pages raise them; `console.site` shows them.
"""


class BadRequest(Exception):
    """The message says what to write instead."""


class NotThere(Exception):
    """The message says where to look instead."""


class Busy(Exception):
    """The message says what to do instead."""


class Refused(Exception):
    """A change that cannot be made as things are. The message says why, and what to do."""


class Forbidden(Exception):
    """A change that no page of this console has asked for. The message says why it is taken for one."""
