"""`post` of a user's function: what the policy's engines answer is noted for the weight versions."""

from collections.abc import Mapping
from typing import Any

from fusionrl.engines.post_request import post as _post
from fusionrl.rollout.weight_versions import note_answer


async def post(
    url: str, payload: Mapping[str, object], max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """POST `payload` as JSON and return the JSON that is answered; the run's own engines get their key by themselves.

    Broken connections and 5xx answers are tried again, with growing pauses of up to 8 s. Answers of the policy's
    engines are noted, so that the samples that a generate or rollout function makes get their weight versions. Raises
    ValueError for a request to /generate without a token, of which an engine dies. Raises RuntimeError with the
    server's text for a 4xx answer, or the last failed try.
    """
    ids = payload.get("input_ids")
    if url.endswith("/generate") and isinstance(ids, list) and (not ids or [] in ids):
        raise ValueError(f"post to {url}: input_ids is empty; give the tokens of the prompt")
    answer = await _post(url, payload, max_retries, headers)
    note_answer(url, answer, payload)
    return answer
