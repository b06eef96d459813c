"""Listened-to and advertised addresses, named listeners, the rule of HTTP: what is read, and what is refused."""

from pathlib import Path

import pytest

from smq.coordinator.config.node_toml import HttpConfig, ServerConfig, dump_config, parse_config, told
from smq.coordinator.user_errors import ConfigError

GOOD = """
node_id = 1
cluster_id = "c"
data_dir = "data"
"""
PEERS = '[peers]\n1 = "127.0.0.1:9001"\n2 = "127.0.0.1:9002"\n'
TLS = '[tls]\nca = "ca"\ncertificate = "crt"\nkey = "key"\n'
WILD = """
insecure = true
nodes_address = "[::]:7400"
grpc_address = "0.0.0.0:7401"
grpc_advertised = "a.example.org:17401"
http_address = "[::]:7402"
http_advertised = "a.example.org:7402"
kafka_address = "[::]:9092"
kafka_advertised = "a.example.org:0"
"""
OUTSIDE = """
[listeners.outside]
grpc_address = "127.0.0.1:7501"
grpc_advertised = "203.0.113.1:1"
kafka_address = "127.0.0.1:9094"
kafka_advertised = { 1 = "203.0.113.1:9094", 2 = "203.0.113.1:9095" }
"""


def parse(text: str) -> ServerConfig:
    return parse_config(text, base_dir=Path("/d"))


def test_what_is_advertised_differs_from_what_is_listened_to() -> None:
    config = parse(GOOD + WILD + PEERS)
    assert config.nodes_listen == ("::", 7400)
    node = config.node_config(grpc_address=("0.0.0.0", 7401), http_address=("::", 7402), kafka_address=("::", 9092))
    assert node.grpc_address == "a.example.org:17401"
    assert node.http_address == "a.example.org:7402"
    assert node.kafka_address == "a.example.org:9092"  # port 0 stands for the port that was bound


def test_without_an_advertised_address_the_bound_one_is_told() -> None:
    assert told(("127.0.0.1", 4711), None) == ("127.0.0.1", 4711)


def test_a_named_listener_has_addresses_by_node() -> None:
    first, second = (parse(GOOD.replace("= 1", f"= {n}") + PEERS + OUTSIDE).listeners["outside"] for n in (1, 2))
    assert first.kafka_advertised == ("203.0.113.1", 9094)
    assert second.kafka_advertised == ("203.0.113.1", 9095)
    assert [way.name for way in parse(GOOD + PEERS + OUTSIDE).ways_in] == ["", "outside"]


def test_a_listener_has_the_security_of_the_node_unless_it_says_otherwise() -> None:
    config = parse(GOOD + PEERS + OUTSIDE + "client_certificates = false\n" + TLS)
    own, outside = config.ways_in
    tls = config.tls_of(own)
    assert tls is not None
    assert tls.client_certificates
    tls = config.tls_of(outside)
    assert tls is not None
    assert not tls.client_certificates
    plain = parse(GOOD + PEERS + OUTSIDE + "tls = false\n" + TLS)
    assert plain.tls_of(plain.listeners["outside"]) is None


def test_what_is_written_is_read_back() -> None:
    rule = '[http]\ntls = true\nprobes = "anyone"\nmetrics = "token"\ntoken_file = "/d/token"\nconsole_changes = true\n'
    for text in (GOOD + WILD + PEERS + OUTSIDE, GOOD + PEERS + OUTSIDE + "tls = false\n" + TLS + rule):
        config = parse(text)
        assert parse(dump_config(config)) == config


def test_a_listener_may_have_a_certificate_of_its_own() -> None:
    own = 'certificate = "out.crt"\nkey = "/k/out.key"\n'
    config = parse(GOOD + PEERS + OUTSIDE + own + TLS)
    tls = config.tls_of(config.listeners["outside"])
    assert tls is not None
    assert (tls.ca, tls.certificate, tls.key) == (Path("/d/ca"), Path("/d/out.crt"), Path("/k/out.key"))
    assert parse(dump_config(config)) == config


OPEN = OUTSIDE.replace("127.0.0.1:9094", "0.0.0.0:9094")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("insecure = true\n" + GOOD + 'grpc_address = "[::]:1"\n' + PEERS, "grpc_address is .*Set grpc_advertised to"),
        ("insecure = true\n" + GOOD + 'http_address = "0.0.0.0:1"\n' + PEERS, "Set http_advertised to"),
        (GOOD + 'grpc_advertised = "0.0.0.0:1"\n' + PEERS, "grpc_advertised is 0.0.0.0:1, to which no client can"),
        (GOOD + 'kafka_advertised = "a:1"\n' + PEERS, "kafka_advertised is set, but kafka_address is not"),
        (
            GOOD + PEERS + '[listeners.outside]\nkafka_address = "127.0.0.1:1"\ngrpc_advertised = "a:1"\n',
            "listeners.outside.grpc_advertised is set, but listeners.outside.grpc_address is not",
        ),
        (GOOD + PEERS.replace("127.0.0.1:9001", "0.0.0.0:9001"), "peers.1 is 0.0.0.0:9001"),
        ("insecure = true\n" + GOOD + PEERS.replace("127.0.0.1:9002", "[::]:9002"), "peers.2 .*no node can connect"),
        (GOOD + PEERS.replace(":9002", ":9001"), "peers.1 and peers.2 are both 127.0.0.1:9001"),
        (GOOD + 'nodes_address = "127.0.0.1:0"\n' + PEERS, "needs a fixed port"),
        (GOOD + 'grpc_address = "127.0.0.1:9001"\n' + PEERS, "nodes_address and grpc_address are both"),
        (
            GOOD + 'grpc_advertised = "a:1"\nhttp_advertised = "a:1"\n' + PEERS,
            r"grpc_advertised and http_advertised are both a:1 \(advertised\)",
        ),
        (GOOD + PEERS + '[listeners]\nkafka_address = "127.0.0.1:1"\n', r"a listener needs a name.*\[listeners.NAME\]"),
        (GOOD + PEERS + '[[listeners]]\nkafka_address = "127.0.0.1:1"\n', r"must be a table"),
        (GOOD + PEERS + OUTSIDE.replace("outside", "Outside"), "'Outside' cannot name a listener"),
        (GOOD + PEERS + OUTSIDE.replace("outside", "out-side"), "'out-side' cannot name a listener"),
        (GOOD + PEERS + "[listeners.outside]\n", "opens no port: give it a grpc_address or a kafka_address"),
        (GOOD + PEERS + OUTSIDE + 'http_address = "a:1"\n', r"under \[listeners.outside\]: http_address"),
        (GOOD + PEERS + OUTSIDE + 'tls = "no"\n', "listeners.outside.tls is 'no': it must be true or false"),
        (GOOD + PEERS + OUTSIDE + "tls = true\n", r"\[listeners.outside\] asks for TLS: name"),
        (GOOD + PEERS + OUTSIDE + 'key = "k"\n' + TLS, r"needs a certificate and its key together"),
        (GOOD + PEERS + OUTSIDE + 'ca = "k"\n' + TLS, r"needs a certificate and its key together"),
        (GOOD + PEERS + OUTSIDE + 'certificate = "c"\nkey = "k"\n', r"\[listeners.outside\] asks for TLS"),
        (GOOD + PEERS + OPEN, "listeners.outside.kafka_address is 0.0.0.0:9094.*without TLS any client"),
        (GOOD + PEERS + OPEN + "tls = false\n" + TLS, "listeners.outside.kafka_address .*without TLS any client"),
        (GOOD + PEERS + OPEN + "client_certificates = false\n" + TLS, "listeners.outside.kafka_address .*admits any"),
        (GOOD.replace("= 1", "= 3") + PEERS + '3 = "127.0.0.1:9003"\n' + OUTSIDE, "no address for node 3: add 3 ="),
        (GOOD + PEERS + OUTSIDE.replace(":9095", ":9094"), "gives nodes 1 and 2 the same address '203.0.113.1:9094'"),
        (GOOD + PEERS + OUTSIDE.replace("2 =", "two ="), "has the key 'two': its keys are node ids"),
        (GOOD + PEERS + "".join(OUTSIDE.replace("outside", f"l{n}") for n in range(9)), "a node may have 8"),
    ],
)
def test_addresses_that_cannot_work_are_refused_and_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)


ASKS = '[listeners.outside]\nkafka_address = "127.0.0.1:9094"\nsasl = ["SCRAM-SHA-512", "PLAIN"]\n'
SCRAM = ASKS.replace(', "PLAIN"', "")
TOKENS = ASKS.replace('"PLAIN"', '"OAUTHBEARER"')
OAUTH = '[oauth]\njwks = "https://a/jwks"\nca = "a.crt"\nissuer = "https://a"\naudience = ["smq"]\nscopes = ["s"]\n'
NAMES = 'certificate_users = ["RULE:CN=([^,]*).*/$1/L", "DEFAULT"]\n'
PARTNER = '[listeners.partner]\nkafka_address = "127.0.0.1:9099"\nca = "p"\ncertificate = "c"\nkey = "k"\n' + NAMES
BOTH = OUTSIDE + 'sasl = ["SCRAM-SHA-256"]\n'
OWN = GOOD + 'kafka_address = "127.0.0.1:9092"\nsasl = ["SCRAM-SHA-256"]\n' + PEERS


@pytest.mark.parametrize(
    "text",
    [
        GOOD + PEERS + SCRAM,
        GOOD + PEERS + ASKS + "sasl_session_ms = 1000\n" + TLS,
        GOOD + PEERS + TOKENS + TLS + OAUTH,
        GOOD + PEERS + ASKS + TLS + NAMES,
        GOOD + PEERS + ASKS + PARTNER + TLS + NAMES,
        GOOD + PEERS + ASKS + "client_certificates = false\n" + TLS,
        GOOD + PEERS + ASKS.replace("127.0.0.1", "203.0.113.1") + TLS,
        GOOD + PEERS + BOTH + TLS,
        GOOD + PEERS + BOTH + "client_certificates = true\n" + TLS,
        GOOD + PEERS + ASKS.replace("kafka", "grpc") + TLS,
        OWN + TLS,
    ],
)
def test_a_port_that_asks_for_users_is_read_and_written(text: str) -> None:
    config = parse(text)
    assert any(way.sasl for way in config.ways_in)
    assert parse(dump_config(config)) == config


def test_a_variable_names_mechanisms_with_commas() -> None:
    environment = {"SMQ_LISTENERS__OUTSIDE__SASL": "SCRAM-SHA-256, SCRAM-SHA-512"}
    config = parse_config(GOOD + PEERS + SCRAM, base_dir=Path("/d"), environment=environment)
    assert config.listeners["outside"].sasl == ("SCRAM-SHA-256", "SCRAM-SHA-512")


@pytest.mark.parametrize("insecure", ["", "insecure = true\n"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + PEERS + ASKS, "listeners.outside.sasl has PLAIN, which sends passwords: turn on TLS"),
        (GOOD + PEERS + ASKS + "tls = false\n" + TLS, "listeners.outside.sasl has PLAIN"),
        (GOOD + PEERS + BOTH, "without TLS their tokens at listeners.outside.grpc_address"),
        (GOOD + PEERS + BOTH + "tls = false\n" + TLS, "without TLS their tokens at listeners.outside.grpc_addr"),
        (GOOD + PEERS + TLS + 'certificate_users = ["CN=(.*)"]\n', r"tls.certificate_users: 'CN=\(\.\*\)' is no rule"),
        (GOOD + PEERS + TLS + "client_certificates = false\n" + NAMES, "client_certificates is false"),
        (GOOD + PEERS + PARTNER.replace(NAMES, "") + TLS + NAMES, "listeners.partner.ca could name any user"),
        (GOOD + PEERS + PARTNER.replace('ca = "p"\n', "") + TLS, "listeners.partner.certificate_users is set, but"),
        (OWN, "sasl asks for users, and without TLS their tokens at grpc_address could be read"),
        (
            GOOD + PEERS + ASKS.replace("kafka", "grpc").replace('"SCRAM-SHA-512", ', "") + TLS,
            "no mechanism for listen",
        ),
        (GOOD + PEERS + TOKENS + OAUTH, "listeners.outside.sasl has OAUTHBEARER, which sends tokens: turn on TLS"),
        (GOOD + PEERS + TOKENS + TLS, r"listeners.outside.sasl has OAUTHBEARER: say under \[oauth\]"),
        (
            GOOD + PEERS + TLS + OAUTH.replace("https://a/jwks", "http://a/jwks"),
            "oauth.jwks is .* begins with https://",
        ),
        (GOOD + PEERS + TLS + OAUTH.replace("https://a/jwks", "jwks"), "oauth.ca is set, but oauth.jwks is a file"),
        (GOOD + PEERS + TLS + OAUTH.replace('["smq"]', "[]"), "oauth.audience is empty"),
        (GOOD + PEERS + TLS + OAUTH.replace('issuer = "https://a"', ""), "oauth.issuer is missing"),
        (GOOD + PEERS + TLS + OAUTH + "clock_skew_ms = 600001\n", "oauth.clock_skew_ms is more than 600000"),
        ('super_users = ["*"]\n' + GOOD + PEERS, r"super_users: no user may have the name \*"),
        (GOOD + PEERS + OUTSIDE + "sasl_session_ms = 5\n", "sasl_session_ms is set, but listeners.outside.sasl is not"),
        (GOOD + PEERS + OUTSIDE + "sasl = []\n", "listeners.outside.sasl is .*: it must be a list of SCRAM-SHA-256"),
        (GOOD + PEERS + OUTSIDE + "sasl = true\n", "it must be a list of SCRAM-SHA-256"),
        (GOOD + PEERS + OUTSIDE + 'sasl = ["GSSAPI"]\n', "listeners.outside.sasl names 'GSSAPI': known are"),
        (GOOD + PEERS + OUTSIDE + 'sasl = ["PLAIN", "PLAIN"]\n', "names a mechanism twice"),
    ],
)
def test_users_that_could_be_gone_around_are_refused_and_named(text: str, says: str, insecure: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(insecure + text)


def test_scram_without_tls_is_for_loopback_addresses() -> None:
    with pytest.raises(ConfigError, match=r"kafka_address is 203\.0\.113\.1:9094, which is not a loopback"):
        parse(GOOD + PEERS + SCRAM.replace("127.0.0.1", "203.0.113.1"))


def test_the_rule_of_http_is_read() -> None:
    http = parse(GOOD + PEERS + '[http]\nprobes = "anyone"\nmetrics = "token"\ntoken_file = "t"\n').http
    assert http == HttpConfig(probes="anyone", metrics="token", token_file=Path("/d/t"))
    assert parse(GOOD + PEERS).http == HttpConfig()


PUBLIC = GOOD + 'http_address = "[::]:7402"\nhttp_advertised = "a:7402"\n' + PEERS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + PEERS + '[http]\nprobes = "all"\n', "http.probes is 'all': it must be 'clients' or 'anyone'"),
        (GOOD + PEERS + '[http]\nmetrics = "token"\n', "name the file with the token as http.token_file"),
        (GOOD + PEERS + '[http]\ntoken_file = "t"\n', 'set metrics = "token"'),
        (GOOD + PEERS + "[http]\ntls = true\n", r"http.tls is true: name the node's certificates under \[tls\]"),
        (GOOD + PEERS + '[http]\nuser = "a"\n', r"unknown settings under \[http\]: user"),
        (GOOD + PEERS + "[http]\nconsole_changes = 1\n", "http.console_changes is 1: it must be true or false"),
        ("insecure = true\n" + PUBLIC + "[http]\nconsole_changes = true\n", "anyone who reaches http_address"),
        (PUBLIC + '[http]\nprobes = "anyone"\nmetrics = "anyone"\n', "may be public: listen on a private address"),
        (PUBLIC + '[http]\nprobes = "anyone"\nmetrics = "token"\ntoken_file = "t"\n', "turn on http.tls"),
        (PUBLIC + '[http]\nprobes = "anyone"\n', "http_address is .*not a loopback"),
        (PUBLIC + TLS + "[http]\ntls = false\n", "http_address is .*without TLS any client"),
    ],
)
def test_a_rule_of_http_that_lets_strangers_in_is_refused_and_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        PUBLIC + TLS + '[http]\nprobes = "anyone"\nmetrics = "token"\ntoken_file = "t"\n',
        PUBLIC + TLS,
        PUBLIC + TLS + "[http]\nconsole_changes = true\n",
        GOOD + PEERS + "[http]\nconsole_changes = true\n",
        PUBLIC.replace("[::]", "10.0.0.5") + '[http]\nprobes = "anyone"\nmetrics = "anyone"\n',
    ],
)
def test_a_rule_of_http_that_keeps_strangers_out_is_accepted(text: str) -> None:
    parse(text)
