"""Blocking HTTP calls to the control endpoints of an engine or the router."""

from collections.abc import Mapping

import orjson
import requests

LONGEST_ANSWER = 256 << 20  # bytes: control endpoints answer kilobytes, checksums of a large model some megabytes
# With ROUTER_KEY, in the environment of the processes that run users' functions, which may ask the engines.
ROUTER_URLS = "FUSIONRL_ROUTER_URLS"


class EndpointError(RuntimeError):
    """An endpoint answered with an error status; `status` holds it."""

    def __init__(self, url: str, status: int, text: str) -> None:
        super().__init__(f"{url} answered {status}: {text[:2000]}")
        self.status = status


def auth_headers(api_key: str | None) -> dict[str, str]:
    """The header that SGLang's server and router expect when they were started with an API key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def call(
    method: str,
    url: str,
    payload: Mapping[str, object] | None = None,
    *,
    api_key: str | None = None,
    timeout_s: float = 60.0,
) -> object:
    """Send one request; return the decoded JSON, the text where it is none, or None for an empty answer.

    Raises `EndpointError` (a RuntimeError with endpoint, status and text) for a status of 400 or more, and
    RuntimeError without an answer within `timeout_s` seconds, or for one of over `LONGEST_ANSWER` bytes.
    """
    with requests.Session() as session:
        session.trust_env = False  # a proxy from the environment has no route to an engine
        try:
            response = session.request(
                method,
                url,
                data=None if payload is None else orjson.dumps(payload),
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **auth_headers(api_key)},
                timeout=timeout_s,
                stream=True,
            )
            content = _bounded(response)
        except requests.RequestException as error:
            raise RuntimeError(f"{url} did not answer: {error}") from error
    text = content.decode(errors="replace")
    if response.status_code >= 400:
        raise EndpointError(url, response.status_code, text)
    if not content:
        return None
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return text


def as_object(answer: object, name: str) -> dict[str, object]:
    """`answer` as the JSON object that it should be; else RuntimeError."""
    if not isinstance(answer, dict):
        raise RuntimeError(f"{name} is not a JSON object: {str(answer)[:200]}")
    return answer


def as_list(answer: object, name: str) -> list[object]:
    """`answer` as the JSON list that it should be; else RuntimeError."""
    if not isinstance(answer, list):
        raise RuntimeError(f"{name} is not a JSON list: {str(answer)[:200]}")
    return answer


def _bounded(response: requests.Response) -> bytes:
    """The body; what it becomes when it is unpacked is bounded, too."""
    parts, size = [], 0
    for part in response.iter_content(1 << 20):
        size += len(part)
        if size > LONGEST_ANSWER:
            raise RuntimeError(f"{response.url} answered with over {LONGEST_ANSWER} bytes")
        parts.append(part)
    return b"".join(parts)
