"""The keys of a password, against the example of RFC 7677."""

import hmac
from base64 import b64decode, b64encode

from smq.clients import scram
from smq.clients.scram import BY_NAME

# RFC 7677, section 3: the user "user" with the password "pencil".
CLIENT_FIRST = "n=user,r=rOprNGfwEbeRWgbNEkqO"
NONCE = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SERVER_FIRST = f"r={NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
WITHOUT_PROOF = f"c=biws,r={NONCE}"
PROOF = "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
SERVER_SIGNATURE = "6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def test_the_keys_are_those_of_the_rfc() -> None:
    mechanism, salt = BY_NAME["SCRAM-SHA-256"], b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    salted = scram.salted(mechanism, b"pencil", salt, 4_096)
    keys = scram.keys_of(mechanism, salted, salt, 4_096)
    message = f"{CLIENT_FIRST},{SERVER_FIRST},{WITHOUT_PROOF}".encode()
    assert b64encode(scram.keyed(mechanism, keys.server_key, message)).decode() == SERVER_SIGNATURE
    signature = scram.keyed(mechanism, keys.stored_key, message)
    proof = bytes(a ^ b for a, b in zip(scram.client_key(mechanism, salted), signature, strict=True))
    assert b64encode(proof).decode() == PROOF


def test_a_new_password_has_a_salt_of_its_own_for_each_mechanism_and_shows_no_key() -> None:
    found = [*scram.new_keys("päss word"), *scram.new_keys("päss word")]
    assert [keys.mechanism.name for keys in found] == 2 * ["SCRAM-SHA-256", "SCRAM-SHA-512"]
    assert len({keys.salt for keys in found}) == len({keys.stored_key for keys in found}) == len(found)
    for keys in found:
        again = scram.salted(keys.mechanism, "päss word".encode(), keys.salt, keys.iterations)
        assert scram.keys_of(keys.mechanism, again, keys.salt, keys.iterations) == keys
        assert not hmac.compare_digest(keys.stored_key, keys.server_key)
        assert repr(keys) == f"Keys(mechanism={keys.mechanism!r}, iterations=16384)"
