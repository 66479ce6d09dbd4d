"""A relay on an object store: S3, Google Cloud Storage, Azure, and compatible ones. Needs the extra `object`.

A value is one object, put in one request that the store refuses if the object exists; object stores make it appear
whole by themselves. The library retries what fails on the way, so a put whose first response was lost can come back as
`KeyExists` although it was ours: the chain checks for that. Credentials come from the options or the environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rose.errors import ConfigError, Unavailable
from rose.weights.relay.relay_base import (
    Buffer,
    Buffers,
    KeyExists,
    KeyMissing,
    RelayEntry,
    check_key,
    check_prefix,
    check_range,
)

REQUEST_S = 60
CONNECT_S = 5
RETRIES_MAX = 3
CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "proxy_url")  # the rest is the store's own


class ObjectRelay:
    """Values as objects below a URL such as s3://bucket/folder."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        self.url = url
        self._obstore, self._errors = _library()
        config = dict(options or {})
        client = {name: config.pop(name) for name in CLIENT_OPTIONS if name in config}
        client |= {"timeout": f"{REQUEST_S}s", "connect_timeout": f"{CONNECT_S}s"}
        retry = {"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=REQUEST_S)}
        try:
            self._store = self._obstore.store.from_url(url, config=config, client_options=client, retry_config=retry)
        except Exception as error:
            hint = "check the address and the options; credentials can also come from the environment"
            raise ConfigError(f"the object store {url} cannot be used: {error}", hint=hint) from error

    def put_new(self, key: str, buffers: Buffers) -> int:
        check_key(key)
        if self._size(key) is not None:  # most refusals, before the bytes are sent
            raise KeyExists(key)
        views = [
            memoryview(buffer).cast("B") for buffer in buffers
        ]  # sent from where they lie: to join them is to copy
        with self._translated(key):
            self._obstore.put(self._store, key, views, mode="create", use_multipart=False)
        return sum(len(view) for view in views)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> Buffer:
        check_key(key)
        if stop is None or not 0 <= start < stop:
            size = self._size(key)
            if size is None:
                raise KeyMissing(key)
            start, stop = check_range(key, start, stop, size)
        if start == stop:
            return b""
        with self._translated(key):
            try:
                response = self._obstore.get(self._store, key, options={"range": (start, stop)})
                data = memoryview(response.bytes())
            except self._errors.GenericError:
                check_range(key, start, stop, self._size(key) or 0)  # a range that begins outside is an error there
                raise
            if len(data) != stop - start:  # one that ends outside is cut short
                check_range(key, start, stop, response.meta["size"])
                raise Unavailable(f"`{key}` came incomplete from {self.url}")
            return data

    def list(self, prefix: str = "") -> Sequence[RelayEntry]:
        prefix = check_prefix(prefix)
        with self._translated(prefix or "all keys"):
            items = self._obstore.list(self._store, prefix or None).collect()
        return sorted(RelayEntry(item["path"], item["size"]) for item in items)

    def delete(self, key: str) -> bool:
        check_key(key)
        if self._size(key) is None:
            return False
        with self._translated(key):
            try:
                self._obstore.delete(self._store, key)
            except FileNotFoundError:
                return False
        return True

    def close(self) -> None:
        """Do nothing: connections belong to the library."""

    def _size(self, key: str) -> int | None:
        with self._translated(key):
            try:
                return int(self._obstore.head(self._store, key)["size"])
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Translate the library's errors."""
        errors = self._errors
        try:
            yield
        except (errors.AlreadyExistsError, errors.PreconditionError) as error:
            raise KeyExists(key) from error
        except FileNotFoundError as error:
            raise KeyMissing(key) from error
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            hint = "check the credentials and what they may do in this bucket: read, write, list, delete"
            raise ConfigError(f"{self.url} refuses `{key}`: {_short(error)}", hint=hint) from error
        except errors.BaseError as error:
            raise Unavailable(f"{self.url} failed at `{key}`: {_short(error)}") from error


def _library() -> tuple[Any, Any]:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        hint = "pip install 'rose-rl[object]'"
        raise ConfigError("object stores need the package obstore, which is not installed", hint=hint) from error
    return obstore, obstore.exceptions


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
