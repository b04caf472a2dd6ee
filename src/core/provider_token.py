"""The provider token: the signed claim of who we are that every push carries."""

import jwt

from core.secret import SigningKey, load_p256

# Apple's two limits: a token older than 60 min is refused (403 ExpiredProviderToken), and so is a new one within 20 min
# (429 TooManyProviderTokenUpdates). What we do in between:
#
#   A token is dated back to the full half hour, so that environments which never speak to one another date it alike.
#   Freshly minted it is therefore 0 to 30 min old. It is renewed when it is 50 min old, hence 20 to 50 min after it
#   was minted: never sooner than 20. And 10 min remain for clocks that go wrong and for answers that take long.
#
# At any moment the tokens of all environments are dated to this half hour or to the one before; in the last
# ten minutes of a half hour only to this one.
BUCKET_SECONDS = 30 * 60
RENEW_SECONDS = 50 * 60
REPLACEABLE_SECONDS = 20 * 60


class ProviderToken:
    """The token of one signing key. A new key is a new ProviderToken."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self._private_key = load_p256(key.private_key)  # once: reading the PEM takes as long as signing
        self._bearer = ""
        self.issued_at: int | None = None  # the token's `iat`
        self.minted_at: float | None = None  # when we signed it

    def bearer(self, now: float) -> str:
        """Give the `authorization` of a push that begins now: seconds since the epoch, by the wall clock as `iat`."""
        # A token from the future: the wall clock was put back, and Apple may take the token for forged.
        if self.issued_at is None or not 0 <= now - self.issued_at < RENEW_SECONDS:
            self._mint(now, issued_at=int(now // BUCKET_SECONDS) * BUCKET_SECONDS)
        return self._bearer

    def replace(self, now: float) -> bool:
        """Mint a fresh one, dated now, since APNs calls ours expired. False: ours is too young to be replaced."""
        if self.minted_at is None or now - self.minted_at < REPLACEABLE_SECONDS:
            return False
        self._mint(now, issued_at=int(now))
        return True

    def replaceable_in(self, now: float) -> float:
        """Seconds until another one may be minted."""
        return max(self.minted_at + REPLACEABLE_SECONDS - now, 0.0) if self.minted_at is not None else 0.0

    def _mint(self, now: float, issued_at: int) -> None:
        token = jwt.encode(
            {"iss": self._key.team_id, "iat": issued_at},
            self._private_key,
            algorithm="ES256",
            # Apple documents `alg` and `kid` alone; None takes out the `typ` that PyJWT adds.
            headers={"kid": self._key.key_id, "typ": None},
        )
        self._bearer, self.issued_at, self.minted_at = f"bearer {token}", issued_at, now
