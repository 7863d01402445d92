"""Blocking HTTP calls to the control endpoints of an engine or the router."""

from __future__ import annotations

from typing import Any

import orjson
import requests


class EndpointError(RuntimeError):
    """An endpoint answered with an error status; `status` holds it."""

    def __init__(self, url: str, status: int, text: str) -> None:
        super().__init__(f"{url} answered {status}: {text[:2000]}")
        self.status = status


# In the environment of the processes that run users' functions, which may ask the engines; beside ROUTER_KEY.
ROUTER_URLS = "FUSIONRL_ROUTER_URLS"


def auth_headers(api_key: str | None) -> dict[str, str]:
    """The header that SGLang's server and router expect when they were started with an API key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def call(
    method: str,
    url: str,
    payload: dict[str, Any] | None = None,
    *,
    api_key: str | None = None,
    timeout_s: float = 60.0,
) -> Any:
    """Send one request; return the decoded JSON, the text where it is none, or None for an empty answer.

    Raises `EndpointError` (a RuntimeError with endpoint, status and text) for a status of 400 or more, and
    RuntimeError when there is no answer within `timeout_s` seconds.
    """
    with requests.Session() as session:
        session.trust_env = False  # a proxy from the environment has no route to an engine
        try:
            response = session.request(
                method,
                url,
                data=None if payload is None else orjson.dumps(payload),
                headers={"Content-Type": "application/json", **auth_headers(api_key)},
                timeout=timeout_s,
            )
        except requests.RequestException as error:
            raise RuntimeError(f"{url} did not answer: {error}") from error
    if response.status_code >= 400:
        raise EndpointError(url, response.status_code, response.text)
    if not response.content:
        return None
    try:
        return orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return response.text
