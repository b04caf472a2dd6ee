import socket
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.exceptions import ClientError

from devtools.secrets_manager import LocalSecretsManager


@pytest.fixture
def secrets_manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSecretsManager]:
    with LocalSecretsManager() as started:
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        yield started


def read(secret_id: str) -> str:
    with closing(boto3.client("secretsmanager")) as client:
        return str(client.get_secret_value(SecretId=secret_id)["SecretString"])


def test_what_is_put_is_read_by_name_and_by_arn_and_may_change(secrets_manager: LocalSecretsManager) -> None:
    arn = secrets_manager.put("apns", "one")
    assert [read("apns"), read(arn)] == ["one", "one"]

    assert secrets_manager.put("apns", "two") == arn
    assert [read("apns"), read(arn)] == ["two", "two"]


def test_a_secret_that_was_never_put_is_not_found(secrets_manager: LocalSecretsManager) -> None:
    secrets_manager.put("apns", "one")

    with pytest.raises(ClientError, match="ResourceNotFoundException"):
        read("absent")


def test_each_one_starts_empty(secrets_manager: LocalSecretsManager) -> None:
    with pytest.raises(ClientError, match="ResourceNotFoundException"):
        read("apns")


def test_it_is_on_loopback_and_gone_afterwards_without_a_word(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with LocalSecretsManager() as started:
        started.put("apns", "text")
        address = urlsplit(started.url)
        assert address.hostname == "127.0.0.1"
        assert address.port is not None
        socket.create_connection(("127.0.0.1", address.port), timeout=10).close()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", address.port), timeout=10)
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.name == "werkzeug"] == []
