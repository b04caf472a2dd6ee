"""AWS Secrets Manager on this machine: moto's server, on loopback, in a thread."""

import logging
from contextlib import closing
from http.client import HTTPConnection
from typing import Self

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

REGION = "us-east-1"
CREDENTIALS = "testing"  # of no account: moto takes any


class LocalSecretsManager:
    """`with LocalSecretsManager() as secrets: secrets.put(name, text)`; readers find it by its `environment`."""

    def __init__(self) -> None:
        self.url = ""

    def __enter__(self) -> Self:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request, and a banner
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        # What moto keeps belongs to the process: without this, the secrets of an earlier server would still be there.
        with closing(HTTPConnection(host, port, timeout=10)) as connection:
            connection.request("POST", "/moto-api/reset")
            connection.getresponse().read()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def environment(self) -> dict[str, str]:
        """Lead boto3 here, as environment variables."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": CREDENTIALS,
            "AWS_SECRET_ACCESS_KEY": CREDENTIALS,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def put(self, name: str, text: str) -> str:
        """Create the secret or give it a new value; return its ARN."""
        client = boto3.client(
            "secretsmanager",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=CREDENTIALS,
            aws_secret_access_key=CREDENTIALS,
            config=Config(proxies={}, connect_timeout=5, read_timeout=10),
        )
        with closing(client):
            try:
                secret = client.put_secret_value(SecretId=name, SecretString=text)
            except client.exceptions.ResourceNotFoundException:
                secret = client.create_secret(Name=name, SecretString=text)
        return str(secret["ARN"])
