"""The work of one task on an executor: reads one slice from the cluster into Arrow.

Owns the connections of a worker process, because Spark reuses its workers but not the readers. The `read` of batch and
stream readers delegates to it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pyspark.sql.types import StructType

from smq.records import BatchCorrupt
from smq.spark_connector.cluster_calls import Cluster
from smq.spark_connector.errors import ReadError
from smq.spark_connector.garbage_collection import freeze_loaded_modules
from smq.spark_connector.options import Security, SourceOptions
from smq.spark_connector.planning import Range
from smq.spark_connector.schema import arrow_schema, check_projection

CLUSTERS_MAX: Final = 8  # clusters with open connections per worker; a session that reads more is rare

_clusters: OrderedDict[tuple[tuple[str, ...], int, Security], Cluster] = OrderedDict()


def cluster_of(options: SourceOptions) -> Cluster:
    """This process's connections for these options, kept for the next task."""
    return connected(options.servers, options.retry_timeout_ms, options.security)


def connected(servers: tuple[str, ...], retry_timeout_ms: int, security: Security) -> Cluster:
    """This process's connections, kept for the next task."""
    key = (servers, retry_timeout_ms, security)
    cluster = _clusters.pop(key, None) or Cluster(*key)
    _clusters[key] = cluster
    while len(_clusters) > CLUSTERS_MAX:
        _clusters.popitem(last=False)[1].close()
    return cluster


def read_slice(options: SourceOptions, schema: StructType, ranges: Sequence[Range]) -> Iterator[Any]:
    """Arrow batches of `ranges`, in order. Yields all rows of each range, or raises."""
    # Not for the processes that plan and commit, which import this module, too: these take as long as all the others.
    from smq.spark_connector.decode import Decoder
    from smq.spark_connector.range_fetcher import RangeFetcher

    freeze_loaded_modules()
    columns = check_projection(schema)
    arrow = arrow_schema(schema)
    for wanted in ranges:
        fetcher = RangeFetcher(cluster_of(options), wanted, fail_on_data_loss=options.fail_on_data_loss)
        decoder = Decoder(wanted.topic, wanted.partition, columns, arrow)
        try:
            for raw in fetcher:
                yield from decoder.add(raw, wanted.lo, wanted.hi)
        except BatchCorrupt as e:
            raise ReadError(
                f"{wanted.topic}-{wanted.partition}: {e}. Its checksum is correct, so its producer wrote it this "
                "way: read around it with startingOffsets and endingOffsets"
            ) from e
        yield from decoder.flush()
