"""A Python shell with a Spark session on a running cluster.

Owns the banner and the reading of commands, typed or piped. It starts nothing before the cluster has answered.
`smq.spark_connector.cli` imports it when the command runs.
"""

import code
import keyword
import sys
from collections.abc import Mapping
from typing import Any, Final

from smq.clients.sync import SyncAdmin

ANSWER_TIMEOUT_MS: Final = 3_000.0  # a user is waiting at a terminal
TOPICS_SHOWN: Final = 10
_EXAMPLE_TOPIC: Final = "my-topic"


def run_shell(servers: str, *, master: str, conf: Mapping[str, str]) -> int:
    """Reads commands until they end. Returns the exit code: 1 if a piped command failed, 0 otherwise.

    SmqError if no node answers, JavaNotFound if Spark cannot start.
    """
    with SyncAdmin(servers, timeout_ms=ANSWER_TIMEOUT_MS, connect_timeout_ms=ANSWER_TIMEOUT_MS) as admin:
        topics = {topic.name: len(topic.partitions) for topic in admin.list_topics()}
    from smq.spark_connector import session

    spark = session("smq spark-shell", master=master, conf={"spark.log.level": "ERROR", **conf})
    try:
        names = {"__name__": "__main__", "spark": spark, "servers": servers}
        shell = _Shell(names)
        shell.interact(banner=banner(spark.version, servers, topics), exitmsg="")
        return int(shell.has_failed and not shell.is_typed)
    finally:
        spark.stop()


def banner(spark_version: str, servers: str, topics: Mapping[str, int]) -> str:
    """The cluster's topics, and example commands."""
    shown = sorted(topics)[:TOPICS_SHOWN]
    more = f" and {len(topics) - len(shown)} more" if len(topics) > len(shown) else ""
    listed = ", ".join(f"{name} ({topics[name]})" for name in shown) + more
    example = shown[0] if shown else _EXAMPLE_TOPIC
    variable = _variable(example)
    return "\n".join(
        (
            f"Spark {spark_version}: `spark` is ready. `servers` is {servers!r}.",
            f"Topics (partitions): {listed}" if topics else "There are no topics yet: smq topic create my-topic",
            "Type for example:",
            f'  {variable} = spark.read.format("smq").options(servers=servers, subscribe="{example}").load()',
            f'  {variable}.selectExpr("partition", "offset", "CAST(value AS STRING)").show()',
            f'  {variable}.createOrReplaceTempView("t"); spark.sql("SELECT count(*), max(offset) FROM t").show()',
            "A DataFrame keeps the offsets of its first action: load() again to see newer records. Ctrl-D ends.",
        )
    )


def _variable(topic: str) -> str:
    """A Python name made from the topic's, if that gives a free one."""
    name = "".join(c if c.isalnum() and c.isascii() else "_" for c in topic)
    is_free = name.isidentifier() and not keyword.iskeyword(name) and name not in ("spark", "servers")
    return name if is_free else "frame"


class _Shell(code.InteractiveConsole):
    """Python's own console. Piped commands get no prompts; any failure sets the exit code."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(names)
        self.is_typed = sys.stdin.isatty()
        self.has_failed = False
        if self.is_typed:
            _complete(names)

    def raw_input(self, prompt: str = "") -> str:
        return super().raw_input(prompt if self.is_typed else "")

    def showtraceback(self) -> None:
        self.has_failed = True
        super().showtraceback()

    def showsyntaxerror(self, *arguments: Any, **options: Any) -> None:
        self.has_failed = True
        super().showsyntaxerror(*arguments, **options)


def _complete(names: dict[str, Any]) -> None:
    """Tab completes names, if this Python was built with readline."""
    try:
        import readline
    except ImportError:
        return
    import rlcompleter

    readline.set_completer(rlcompleter.Completer(names).complete)
    readline.parse_and_bind("tab: complete")
