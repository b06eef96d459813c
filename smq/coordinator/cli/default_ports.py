"""The ports of a node that was given none.

Owns three numbers. Light on purpose: every command imports them.
"""

from typing import Final

GRPC_PORT_DEFAULT: Final = 7401
HTTP_PORT_DEFAULT: Final = 7402
KAFKA_PORT_DEFAULT: Final = 9092  # where Kafka clients look first
