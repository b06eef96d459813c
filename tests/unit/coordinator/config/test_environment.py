"""Settings from environment variables: the rule, who wins, and typing errors."""

import re
from pathlib import Path

import pytest

from smq.coordinator.config.environment import Key, strangers, variable_of
from smq.coordinator.config.node_toml import ServerConfig, known_keys, load_config, parse_config
from smq.coordinator.user_errors import ConfigError
from smq.raft_state.ids import NodeId

ROOT = Path(__file__).resolve().parents[4]
FILE = """
node_id = 1
cluster_id = "c"
data_dir = "data"
kafka_address = "127.0.0.1:9092"
kafka_advertised = "a:9092"
[peers]
1 = "127.0.0.1:9001"
2 = "127.0.0.1:9002"
[settings]
num.partitions = 3
"""


def parse(**variables: str) -> ServerConfig:
    return parse_config(FILE, base_dir=Path("/d"), environment={"PATH": "/bin", **variables})


def test_a_variable_wins_over_the_file() -> None:
    config = parse(
        SMQ_NODE_ID="2",
        SMQ_PEERS__2="127.0.0.1:9010",
        SMQ_INSECURE="true",
        SMQ_REQUEST_BYTES_MAX="2097152",
        SMQ_RACK="a",
        SMQ_TUNING__SESSION_TIMEOUT_MS="900",
        SMQ_SETTINGS__NUM_PARTITIONS="7",
        SMQ_HTTP__PROBES="anyone",
        SMQ_LISTENERS__OUTSIDE__KAFKA_ADDRESS="127.0.0.1:9094",
        SMQ_LISTENERS__OUTSIDE__KAFKA_ADVERTISED__2="b:9094",
    )
    assert config.node_id == 2
    assert config.peers[NodeId(1)] == ("127.0.0.1", 9001)
    assert config.peers[NodeId(2)] == ("127.0.0.1", 9010)
    assert (config.insecure, config.request_bytes_max, config.rack) == (True, 2_097_152, "a")
    assert (config.tuning, config.settings) == ({"session_timeout_ms": 900}, {"num.partitions": "7"})
    assert config.http.probes == "anyone"
    assert config.listeners["outside"].kafka_advertised == ("b", 9094)
    assert config.kafka_advertised == ("a", 9092)  # as in the file


def test_everything_may_come_from_the_environment() -> None:
    variables = {
        "SMQ_NODE_ID": "1",
        "SMQ_CLUSTER_ID": "c",
        "SMQ_DATA_DIR": "/var/lib/smq",
        "SMQ_PEERS__1": "127.0.0.1:7400",
    }
    config = load_config(None, environment=variables)
    assert (config.node_id, config.data_dir) == (1, Path("/var/lib/smq"))
    del variables["SMQ_DATA_DIR"]
    with pytest.raises(ConfigError, match=r"data_dir is missing: set it in node\.toml, or as SMQ_DATA_DIR"):
        load_config(None, environment=variables)


def test_addresses_by_node_take_the_place_of_one_for_all() -> None:
    assert parse(SMQ_KAFKA_ADVERTISED__1="b:1").kafka_advertised == ("b", 1)
    with pytest.raises(ConfigError, match="kafka_advertised names no address for node 1"):
        parse(SMQ_KAFKA_ADVERTISED__2="b:1")


@pytest.mark.parametrize(
    ("host", "expected"), [("smq-0", 1), ("smq-2", 3), ("my-smq-11", 12), ("smq-0.smq.prod.svc", None), ("smq", None)]
)
def test_the_ordinal_of_a_stateful_set_numbers_the_node(
    host: str, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    peers = {f"SMQ_PEERS__{n}": f"127.0.0.1:90{n:02}" for n in range(1, 13)}
    if expected is None:
        with pytest.raises(ConfigError, match=f"the host name '{host}' does not end in a hyphen and a number"):
            parse(SMQ_NODE_ID="hostname", **peers)
    else:
        assert parse(SMQ_NODE_ID="hostname", **peers).node_id == expected


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("SMQ_NODEID", "did you mean SMQ_NODE_ID"),
        ("SMQ_KAFKA_ADRESS", "did you mean SMQ_KAFKA_ADDRESS"),
        ("SMQ_TUNING_SESSION_TIMEOUT_MS", "did you mean SMQ_TUNING__SESSION_TIMEOUT_MS"),
        ("SMQ_SETTINGS__NUM_PARTITION", "did you mean SMQ_SETTINGS__NUM_PARTITIONS"),
        ("SMQ_PEERS__", r"did you mean SMQ_PEERS__\*"),
        ("SMQ_PEER__12", r"did you mean SMQ_PEERS__\*"),
        ("SMQ_LISTENERS__OUTSIDE__KAFKA_ADDR3SS", r"did you mean SMQ_LISTENERS__\*__KAFKA_ADDRESS"),
        ("SMQ_node_id", "did you mean SMQ_NODE_ID"),
        ("SMQ_TLS_CAA", "did you mean SMQ_TLS__CA"),
    ],
)
def test_a_mistyped_variable_is_refused_and_named(variable: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} is no setting of smq: {says}"):
        parse(**{variable: "1"})


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("SMQ_ROOT", "docs/addresses.md has the rule"),
        ("SMQ_X", "docs/addresses.md has the rule"),
        ("SMQ_TUNING__SESSION_TIMEOUT", "the nearest is SMQ_TUNING__SESSION_TIMEOUT_MS"),
        ("SMQ_PEERS", "the nearest is SMQ_PEERS__*"),
        ("SMQ_BOOTSTRAPPER", "the nearest is SMQ_BOOTSTRAP"),
        ("SMQ_SERVICE_HOST", "enableServiceLinks: false"),
        ("SMQ_PORT_9092_TCP_ADDR", "enableServiceLinks: false"),
        ("SMQ_BOOTSTRAP_SERVICE_PORT_KAFKA", "enableServiceLinks: false"),
    ],
)
def test_a_variable_that_resembles_no_key_is_left_alone_and_named(variable: str, advice: str) -> None:
    assert parse(**{variable: "1"}) == parse()
    (said,) = strangers({variable: "1", "SMQ_RACK": "a", "SMQ_TLS_CA": "/ca", "PATH": "/"}, known_keys()).values()
    assert advice in said


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("SMQ_NODE_ID", "one", "SMQ_NODE_ID is 'one': it must be a whole number"),
        ("SMQ_NODE_ID", "", "SMQ_NODE_ID is '': it must be a whole number"),
        ("SMQ_INSECURE", "yes", "SMQ_INSECURE is 'yes': it must be true or false"),
        ("SMQ_LISTENERS__A__TLS", "1", "SMQ_LISTENERS__A__TLS is '1': it must be true or false"),
        ("SMQ_TUNING__SESSION_TIMEOUT_MS", "-1", "must be a whole number"),
        ("SMQ_PEERS__ONE", "a:1", "its keys are node ids"),
        ("SMQ_GRPC_ADDRESS", "a", "grpc_address is 'a': it must be host:port"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_named(variable: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(**{variable: value})


@pytest.mark.parametrize("key", [key for key, kind in known_keys().items() if kind in (bool, int)], ids=variable_of)
def test_every_number_and_truth_is_read_as_one(key: Key) -> None:
    variable = variable_of(key).replace("*", "A")
    with pytest.raises(ConfigError, match=f"{variable} is 'x': it must be "):
        parse(**{variable: "x"})


def test_variables_of_smq_as_a_client_are_left_alone() -> None:
    parse(SMQ_BOOTSTRAP="a:1", SMQ_CLUSTER_DIR="/d", SMQ_TLS_CA="/ca", SMQ_TLS_KEY="/k", SMQ_CONFIG="/node.toml")


def test_no_two_keys_have_the_same_variable() -> None:
    variables = [variable_of(key) for key in known_keys()]
    assert len(set(variables)) == len(variables)


def test_the_project_itself_gives_its_nodes_no_variable_that_they_refuse() -> None:
    """Harnesses and benchmarks start nodes with the environment that they have themselves."""
    found = set()
    for folder in ("chaos_tests", "benchmarks", "examples", "smq/testing"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix in (".py", ".c", ".sh"):
                found |= set(re.findall(r"\bSMQ_[A-Z0-9_]+", path.read_text()))
    assert found
    parse(**dict.fromkeys(found, ""))
