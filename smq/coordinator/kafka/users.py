"""DescribeUserScramCredentials and AlterUserScramCredentials: the users of the cluster, as Kafka's tools see them.

Owns how a request becomes one command for each user. The client has salted the password, so no request has one; what
it sends instead is as good as one, and is dropped once the keys are derived. Only `handlers`
imports it.
"""

import secrets
from collections import Counter, defaultdict

from smq.clients import scram
from smq.coordinator.kafka.codec import Struct
from smq.coordinator.kafka.errors import KafkaError, KafkaRefusal, error_fields, topic_error_fields
from smq.coordinator.kafka.gateway import Gateway
from smq.coordinator.limits import TIMEOUT_MS_DEFAULT
from smq.raft_state.commands import AlterUser, ScramCredential
from smq.raft_state.errors import SmqError
from smq.raft_state.limits import DECOY_SECRET_BYTES, SCRAM_ITERATIONS_MAX, SCRAM_ITERATIONS_MIN


async def describe_user_scram_credentials(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """Mechanisms and iterations of the named users, or of all."""
    answer: Struct = {"throttle_time_ms": 0, "error_code": KafkaError.NONE, "error_message": None, "results": []}
    try:
        await gateway.calls.barrier(TIMEOUT_MS_DEFAULT)
    except SmqError as e:
        return answer | topic_error_fields(e)
    counts = Counter(user["name"] for user in request["users"] or [])
    names = counts or Counter(sorted(gateway.state.users))
    answer["results"] = [_described(gateway, name, count) for name, count in names.items()]
    return answer


def _described(gateway: Gateway, name: str, count: int) -> Struct:
    user = gateway.state.users.get(name)
    code, message = KafkaError.NONE, None
    if user is None:
        code, message = KafkaError.RESOURCE_NOT_FOUND, f"there is no user {name[:80]!r}"
    if count > 1:
        code, message = KafkaError.DUPLICATE_RESOURCE, f"the request names the user {name[:80]!r} {count} times"
    known = user.credentials if user is not None and code is KafkaError.NONE else ()
    infos = [{"mechanism": credential.mechanism, "iterations": credential.iterations} for credential in known]
    return {"user": name, "error_code": code, "error_message": message, "credential_infos": infos}


async def alter_user_scram_credentials(gateway: Gateway, _version: int, request: Struct) -> Struct:
    """All that concerns one user is done together, or not at all."""
    deletions: dict[str, list[int]] = defaultdict(list)
    upsertions: dict[str, list[Struct]] = defaultdict(list)
    for deletion in request["deletions"]:
        deletions[deletion["name"]].append(deletion["mechanism"])
    for upsertion in request["upsertions"]:
        upsertions[upsertion["name"]].append(upsertion)
    results = []
    for name in dict.fromkeys((*deletions, *upsertions)):
        fields: Struct = {"user": name, "error_code": KafkaError.NONE, "error_message": None}
        try:
            await _alter(gateway, name, upsertions[name], deletions[name])
        except KafkaRefusal as e:
            fields |= error_fields(e)
        except SmqError as e:
            fields |= topic_error_fields(e)
        results.append(fields)
    return {"throttle_time_ms": 0, "results": results}


async def _alter(gateway: Gateway, name: str, upsertions: list[Struct], deletions: list[int]) -> None:
    mechanisms = [*(upsertion["mechanism"] for upsertion in upsertions), *deletions]
    if unknown := set(mechanisms) - set(scram.BY_NUMBER):
        message = f"mechanism {min(unknown)} is none of {', '.join(scram.BY_NAME)}"
        raise KafkaRefusal(KafkaError.UNSUPPORTED_SASL_MECHANISM, message)
    if len(set(mechanisms)) < len(mechanisms):
        raise KafkaRefusal(KafkaError.DUPLICATE_RESOURCE, "the request changes a credential of this user twice")
    command = AlterUser(
        name=name,
        set_=tuple(map(_credential, upsertions)),
        unset=tuple(deletions),
        decoy_secret=secrets.token_bytes(DECOY_SECRET_BYTES),
        administrators=gateway.super_users,
    )
    await gateway.calls.propose(command, TIMEOUT_MS_DEFAULT)


def _credential(given: Struct) -> ScramCredential:
    mechanism, size = scram.BY_NUMBER[given["mechanism"]], len(given["salted_password"])
    if size != mechanism.key_bytes:
        message = f"a salted password of {size} bytes: for {mechanism.name} it has {mechanism.key_bytes}"
        raise KafkaRefusal(KafkaError.UNACCEPTABLE_CREDENTIAL, message)
    if not SCRAM_ITERATIONS_MIN <= given["iterations"] <= SCRAM_ITERATIONS_MAX:
        limits = f"{SCRAM_ITERATIONS_MIN} to {SCRAM_ITERATIONS_MAX}"
        message = f"{given['iterations']} iterations: {limits} are allowed"
        raise KafkaRefusal(KafkaError.UNACCEPTABLE_CREDENTIAL, message)
    salt, salted = bytes(given["salt"]), bytes(given["salted_password"])
    keys = scram.keys_of(mechanism, salted, salt, given["iterations"])
    return ScramCredential(
        mechanism=mechanism.number,
        iterations=keys.iterations,
        salt=keys.salt,
        stored_key=keys.stored_key,
        server_key=keys.server_key,
    )
