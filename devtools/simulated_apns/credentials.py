"""The provider's signing key, as Apple issues it: both halves, since here we are Apple and its customer at once."""

import secrets
import string
from dataclasses import dataclass, field
from typing import Self

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

ID_ALPHABET = string.ascii_uppercase + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    team_id: str
    key_id: str
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @classmethod
    def generate(cls) -> Self:
        def ten_characters() -> str:
            return "".join(secrets.choice(ID_ALPHABET) for _ in range(10))

        return cls(team_id=ten_characters(), key_id=ten_characters(), key=ec.generate_private_key(ec.SECP256R1()))

    def private_key(self) -> str:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
