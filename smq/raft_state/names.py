"""Which names a topic may have. Any module may import it."""

import re
from typing import Final

from smq.raft_state.limits import TOPIC_NAME_CHARS_MAX

_TOPIC: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{TOPIC_NAME_CHARS_MAX}}}")


def is_topic_name(name: str) -> bool:
    """Kafka's rule: clients and file names rely on it."""
    return name not in (".", "..") and _TOPIC.fullmatch(name) is not None
